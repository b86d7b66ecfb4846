package service_test

import (
	"bufio"
	"bytes"
	"cmp"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"slices"
	"strings"
	"testing"
)

// call is one line of a table in testdata: a request and the answer to expect. A line with nothing
// but a case begins one, in which $M stands for a model that no other case has.
type call struct {
	Case      string  `json:"case"`
	Method    string  `json:"method"`
	Path      string  `json:"path"`
	Type      *string `json:"type"` // Content-Type; application/json if there is a body and no type
	Body      string  `json:"body"`
	Hex       string  `json:"hex"` // the body, if it is not text
	Pad       int     `json:"pad"` // spaces follow the body up to this size
	Chunked   bool    `json:"chunked"`
	Only      string  `json:"only"` // "alone": for a server without replication
	Status    int     `json:"status"`
	Allow     string  `json:"allow"`
	Answer    string  `json:"answer"`    // exact body, unless empty
	Unordered bool    `json:"unordered"` // its elements may come in any order
	Empty     bool    `json:"empty"`     // the body is
	Any       bool    `json:"any"`       // neither body nor type matter
}

// TestConformance checks a slot tracker by its answers alone: the one that SPILLWAY_TRACKER_URL
// names, else ours.
func TestConformance(t *testing.T) {
	base := os.Getenv("SPILLWAY_TRACKER_URL")
	if base == "" {
		base = start(t, config()).url
	}
	play(t, base, "testdata/conformance.jsonl")
}

// TestExtensions is the same for what only Spillway has.
func TestExtensions(t *testing.T) { play(t, start(t, config()).url, "testdata/extensions.jsonl") }

func play(t *testing.T, base, table string) {
	text, err := os.ReadFile(table)
	if err != nil {
		t.Fatal(err)
	}
	var name, model string
	cases := 0
	lines := bufio.NewScanner(bytes.NewReader(text))
	for n := 1; lines.Scan(); n++ {
		var c call
		if err := json.Unmarshal(lines.Bytes(), &c); err != nil {
			t.Fatalf("%s:%d: %v", table, n, err)
		}
		if c.Case != "" {
			cases++
			name, model = c.Case, fmt.Sprintf("m%d-%d", cases, os.Getpid())
			continue
		}
		if c.Only != "" && os.Getenv("SPILLWAY_TRACKER_URL") != "" {
			continue
		}
		for _, s := range []*string{&c.Path, &c.Body, &c.Answer} {
			*s = strings.ReplaceAll(*s, "$M", model)
		}
		if problem := c.check(base); problem != "" {
			t.Errorf("%s:%d (%s): %s %s %.200s\n%s", table, n, name, c.Method, c.Path, c.Body, problem)
		}
	}
	if cases < 5 {
		t.Errorf("%s: %d cases, that cannot be all", table, cases)
	}
}

func (c *call) check(base string) string {
	body := []byte(c.Body)
	if c.Hex != "" {
		body, _ = hex.DecodeString(c.Hex)
	}
	if pad := c.Pad - len(body); pad > 0 {
		body = append(body, bytes.Repeat([]byte{' '}, pad)...)
	}
	var reader io.Reader = bytes.NewReader(body)
	if c.Chunked {
		reader = io.MultiReader(reader) // of unknown length
	}
	req, err := http.NewRequest(c.Method, base+c.Path, reader)
	if err != nil {
		return err.Error()
	}
	switch {
	case c.Type != nil && *c.Type != "":
		req.Header.Set("Content-Type", *c.Type)
	case c.Type == nil:
		req.Header.Set("Content-Type", "application/json")
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		return err.Error()
	}
	defer func() { _ = res.Body.Close() }()
	got, err := io.ReadAll(res.Body)
	if err != nil {
		return err.Error()
	}
	if res.StatusCode != c.Status {
		return fmt.Sprintf("status %d, want %d: %s", res.StatusCode, c.Status, got)
	}
	if allow := res.Header.Get("Allow"); allow != c.Allow {
		return fmt.Sprintf("Allow %q, want %q", allow, c.Allow)
	}
	return c.checkBody(res, got)
}

func (c *call) checkBody(res *http.Response, got []byte) string {
	kind := res.Header.Get("Content-Type")
	var failure struct{ Error string }
	want := c.Answer
	switch {
	case c.Any:
		return ""
	case c.Empty || c.Method == http.MethodHead:
		if len(got) > 0 || c.Path == "/health" && (kind != "" || res.ContentLength != 0) {
			return fmt.Sprintf("body %q of type %q, want none", got, kind)
		}
		return ""
	case kind != "application/json":
		return fmt.Sprintf("type %q, want application/json", kind)
	case c.Status >= 400:
		if err := json.Unmarshal(got, &failure); err != nil || failure.Error == "" {
			return fmt.Sprintf("body %s, want an error that says something", got)
		}
		return ""
	case want == "":
		want = `{"status":"ok"}`
	case c.Unordered:
		got, want = inOrder(got), string(inOrder([]byte(want)))
	}
	if string(got) != want {
		return fmt.Sprintf("body %s\nwant %s", got, want)
	}
	return ""
}

// inOrder sorts the elements of a JSON array by their text.
func inOrder(text []byte) []byte {
	var list []json.RawMessage
	if err := json.Unmarshal(text, &list); err != nil {
		return text
	}
	slices.SortFunc(list, func(a, b json.RawMessage) int { return cmp.Compare(string(a), string(b)) })
	sorted, _ := json.Marshal(list)
	return sorted
}
