package selectservice_test

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"strconv"
	"strings"
	"testing"
)

// call is one line of a table in testdata: a request and the answer to expect. A line with nothing
// but a case begins one, in which $M stands for a model, and $W1 and $W2 for workers, that no other
// case has.
type call struct {
	Case   string  `json:"case"`
	Method string  `json:"method"`
	Path   string  `json:"path"`
	Type   *string `json:"type"` // Content-Type; application/json if there is a body and no type
	Body   *string `json:"body"`
	Pad    int     `json:"pad"` // spaces follow the body up to this size
	Status int     `json:"status"`
	Want   any     `json:"want"` // what the answer must hold: objects may have more names, arrays no more elements
	Text   string  `json:"text"` // part of the answer
}

// TestConformance checks a selection service by its answers alone: the one that SPILLWAY_SELECT_URL
// names, which must not want KV events, else ours.
func TestConformance(t *testing.T) {
	base := os.Getenv("SPILLWAY_SELECT_URL")
	if base == "" {
		base = start(t, config()).url
	}
	play(t, base, "testdata/conformance.jsonl")
}

func play(t *testing.T, base, table string) {
	text, err := os.ReadFile(table)
	if err != nil {
		t.Fatal(err)
	}
	var name string
	names := strings.NewReplacer()
	cases := 0
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		var c call
		if err := json.Unmarshal([]byte(names.Replace(lines.Text())), &c); err != nil {
			t.Fatalf("%s:%d: %v", table, n, err)
		}
		if c.Case != "" {
			cases++
			name = c.Case
			id := os.Getpid()*1000 + 2*cases
			names = strings.NewReplacer("$M", fmt.Sprintf("m%d-%d", cases, os.Getpid()), "$W1", strconv.Itoa(id), "$W2", strconv.Itoa(id+1))
			continue
		}
		if problem := c.check(base); problem != "" {
			t.Errorf("%s:%d (%s): %s %s\n%s", table, n, name, c.Method, c.Path, problem)
		}
	}
	if cases < 3 {
		t.Errorf("%s: %d cases, that cannot be all", table, cases)
	}
}

func (c *call) check(base string) string {
	var body io.Reader
	if c.Body != nil {
		text := []byte(*c.Body)
		if pad := c.Pad - len(text); pad > 0 {
			text = append(text, bytes.Repeat([]byte{' '}, pad)...)
		}
		body = bytes.NewReader(text)
	}
	req, err := http.NewRequest(c.Method, base+c.Path, body)
	if err != nil {
		return err.Error()
	}
	switch {
	case c.Type != nil && *c.Type != "":
		req.Header.Set("Content-Type", *c.Type)
	case c.Type == nil && c.Body != nil:
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := client.Do(req)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = res.Body.Close() }()
	got, err := io.ReadAll(res.Body)
	if err != nil {
		return err.Error()
	}
	return c.compare(res, string(got))
}

func (c *call) compare(res *http.Response, got string) string {
	sent := ""
	if c.Body != nil {
		sent = fmt.Sprintf("%.300s\n", *c.Body)
	}
	switch {
	case res.StatusCode != c.Status:
		return fmt.Sprintf("%sstatus %d, want %d: %s", sent, res.StatusCode, c.Status, got)
	case !strings.Contains(got, c.Text):
		return fmt.Sprintf("%sbody %s, want it to hold %s", sent, got, c.Text)
	case c.Status == http.StatusBadRequest && strings.HasPrefix(res.Header.Get("Content-Type"), "text/plain"):
		return ""
	case res.Header.Get("Content-Type") != "application/json":
		return fmt.Sprintf("%stype %q, want application/json", sent, res.Header.Get("Content-Type"))
	}
	var have any
	if err := json.Unmarshal([]byte(got), &have); err != nil {
		return err.Error()
	}
	if c.Status >= 400 {
		if failure, _ := have.(map[string]any); failure["error"] == "" || failure["error"] == nil {
			return fmt.Sprintf("%sbody %s, want an error that says something", sent, got)
		}
	}
	if c.Want != nil {
		if why := lacks(have, c.Want); why != "" {
			return fmt.Sprintf("%sbody %s: %s", sent, got, why)
		}
	}
	return ""
}

// lacks tells what of want is not in got, "" for nothing.
func lacks(got, want any) string {
	switch want := want.(type) {
	case map[string]any:
		have, _ := got.(map[string]any)
		for name, w := range want {
			g, ok := have[name]
			if !ok {
				return name + " is missing"
			}
			if why := lacks(g, w); why != "" {
				return name + ": " + why
			}
		}
		return ""
	case []any:
		have, ok := got.([]any)
		if !ok || len(have) != len(want) {
			return fmt.Sprintf("%v, want %d elements", got, len(want))
		}
		for i := range want {
			if why := lacks(have[i], want[i]); why != "" {
				return fmt.Sprintf("[%d]: %s", i, why)
			}
		}
		return ""
	}
	if got != want {
		return fmt.Sprintf("%v, want %v", got, want)
	}
	return ""
}
