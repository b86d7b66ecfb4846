package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/google/uuid"
	"github.com/spf13/cobra"

	"spillway/dispatch"
)

// dispatchClient asks a dispatcher on its --port.
type dispatchClient struct {
	url, key string
	client   http.Client
}

// flags are those of every command that asks a dispatcher.
func (c *dispatchClient) flags(cmd *cobra.Command) {
	cmd.Flags().StringVar(&c.url, "url", "http://127.0.0.1:8093", "the dispatcher's --port")
	cmd.Flags().StringVar(&c.key, "api-key", os.Getenv("SPILLWAY_API_KEY"), "its --api-key (also SPILLWAY_API_KEY)")
	c.client.Timeout = time.Minute
}

// ask sends body, or nothing by GET, and reads the answer into v.
func (c *dispatchClient) ask(ctx context.Context, path string, body []byte, v any) error {
	method := http.MethodPost
	if body == nil {
		method = http.MethodGet
	}
	req, err := http.NewRequestWithContext(ctx, method, strings.TrimRight(c.url, "/")+"/internal/dispatch/"+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if c.key != "" {
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	resp, err := c.client.Do(req)
	if err != nil {
		return failure{err}
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return failure{err}
	}
	if resp.StatusCode != http.StatusOK {
		var e struct{ Error string }
		if json.Unmarshal(text, &e) != nil || e.Error == "" {
			e.Error = strings.TrimSpace(string(text))
		}
		return failure{fmt.Errorf("the dispatcher says %d: %s", resp.StatusCode, e.Error)}
	}
	return json.Unmarshal(text, v)
}

// progress is a bar on a terminal; elsewhere it says nothing.
type progress struct {
	w     io.Writer
	what  string
	total int
	begun time.Time
	on    bool
}

func newProgress(w io.Writer, what string, total int) *progress {
	p := &progress{w: w, what: what, total: total, begun: time.Now()}
	if f, ok := w.(*os.File); ok {
		info, err := f.Stat()
		p.on = err == nil && info.Mode()&os.ModeCharDevice != 0
	}
	return p
}

const barWidth = 30

func (p *progress) show(n int) {
	if !p.on {
		return
	}
	filled := barWidth * n / max(1, p.total)
	rate := float64(n) / max(0.001, time.Since(p.begun).Seconds())
	fmt.Fprintf(p.w, "\r%s [%s%s] %d/%d %.0f/s ", p.what, strings.Repeat("#", filled), strings.Repeat(".", barWidth-filled), n, p.total, rate)
}

func (p *progress) end() {
	if p.on {
		fmt.Fprintln(p.w)
	}
}

// batchLine is one line of a file of requests: ours, or one of an OpenAI batch.
type batchLine struct {
	dispatch.Submission
	CustomID string          `json:"custom_id"`
	URL      string          `json:"url"`
	Body     json.RawMessage `json:"body"`
}

const (
	submitAtOnce = 100
	maxLine      = 32 << 20
)

func newSubmit(p process) *cobra.Command {
	var c dispatchClient
	var queue, list string
	var left time.Duration
	cmd := &cobra.Command{
		Use:   "submit FILE",
		Short: "Put requests into a queue, one JSON object per line (- is standard input)",
		Long: `Each line has the fields id, payload and, if wanted, deadline (Unix seconds), endpoint, headers,
metadata, result_queue_name; or those of an OpenAI batch: custom_id, url, body. A line without an id
gets one. The IDs are written to standard output.`,
		Example: `  spillway dispatch submit requests.jsonl --deadline 24h
  echo '{"id":"r1","payload":{"model":"m","prompt":"Hello","max_tokens":10}}' | spillway dispatch submit -`,
		Args: cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			in := io.Reader(os.Stdin)
			if args[0] != "-" {
				f, err := os.Open(args[0])
				if err != nil {
					return err
				}
				defer f.Close()
				in = f
			}
			all, err := readLines(in, time.Now().Add(left).Unix(), list)
			if err != nil {
				return fmt.Errorf("%s: %w", args[0], err)
			}
			bar := newProgress(p.stderr, "submitted", len(all))
			defer bar.end()
			for from := 0; from < len(all); from += submitAtOnce {
				part := all[from:min(len(all), from+submitAtOnce)]
				var body bytes.Buffer
				enc := json.NewEncoder(&body)
				enc.SetEscapeHTML(false)
				for _, s := range part {
					if err := enc.Encode(s); err != nil {
						return err
					}
				}
				var answer struct{ Active []string } // their IDs are in work already
				if err := c.ask(cmd.Context(), "submit?"+url.Values{"queue": {queue}}.Encode(), body.Bytes(), &answer); err != nil {
					return fmt.Errorf("after %d requests: %w", from, err)
				}
				for _, s := range part {
					if slices.Contains(answer.Active, s.ID) {
						fmt.Fprintln(p.stderr, "in work already:", s.ID)
						continue
					}
					fmt.Fprintln(p.stdout, s.ID)
				}
				bar.show(from + len(part))
			}
			return nil
		},
	}
	c.flags(cmd)
	cmd.Flags().StringVar(&queue, "queue", "", "ID or name of the queue; the first one if not given")
	cmd.Flags().StringVar(&list, "list", "", "list for the results; the queue's if not given")
	cmd.Flags().DurationVar(&left, "deadline", 24*time.Hour, "time from now until which a request without a deadline of its own may be sent")
	return cmd
}

// readLines reads a file of requests.
func readLines(in io.Reader, deadline int64, list string) ([]dispatch.Submission, error) {
	lines := bufio.NewScanner(in)
	lines.Buffer(nil, maxLine)
	var all []dispatch.Submission
	for n := 1; lines.Scan(); n++ {
		if len(bytes.TrimSpace(lines.Bytes())) == 0 {
			continue
		}
		var l batchLine
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			return nil, fmt.Errorf("line %d: %w", n, err)
		}
		s := l.Submission
		if s.Payload == nil {
			s.Payload, s.Endpoint = l.Body, l.URL
		}
		if s.ID == "" {
			s.ID = uuid.NewString()
			if l.CustomID != "" {
				s.ID += "-" + l.CustomID // which users use again
			}
		}
		if s.Payload == nil {
			return nil, fmt.Errorf("line %d: neither payload nor body", n)
		}
		if s.Deadline == 0 {
			s.Deadline = deadline
		}
		if s.ResultQueue == "" {
			s.ResultQueue = list
		}
		all = append(all, s)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	if len(all) == 0 {
		return nil, errors.New("holds no request")
	}
	return all, nil
}

func newDispatchStatus(p process) *cobra.Command {
	var c dispatchClient
	var asJSON bool
	cmd := &cobra.Command{
		Use: "status", Short: "Why something is sent or not, and what the queues hold", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var s dispatch.Status
			if err := c.ask(cmd.Context(), "status", nil, &s); err != nil {
				return err
			}
			if asJSON {
				return json.NewEncoder(p.stdout).Encode(s)
			}
			printStatus(p.stdout, s)
			return nil
		},
	}
	c.flags(cmd)
	cmd.Flags().BoolVar(&asJSON, "json", false, "print it as JSON")
	return cmd
}

func printStatus(w io.Writer, s dispatch.Status) {
	number := func(v *float64, format string) string {
		if v == nil {
			return "?"
		}
		return fmt.Sprintf(format, *v)
	}
	for _, g := range s.Groups {
		fmt.Fprintf(w, "%s: %s. D %s, B %.3g, max_SYS %s %s: N %.1f, in flight %d, not yet seen %d, may go now %d", g.InferencePool, g.State,
			number(g.D, "%.3f"), g.B, number(g.MaxSys, "%.0f"), g.Unit, g.N, g.InFlight, g.Ledger, g.Allowed)
		if g.SampleAgeMS != nil {
			fmt.Fprintf(w, " (%s, %d ms old)", g.Source, *g.SampleAgeMS)
		}
		if g.OverloadSinceMS != nil {
			fmt.Fprintf(w, ", refused at %s, strike %d", time.UnixMilli(*g.OverloadSinceMS).Format(time.TimeOnly), g.Strikes)
		}
		fmt.Fprintln(w)
	}
	for _, q := range s.Queues {
		fmt.Fprintf(w, "%s: %d pending, %d in work, %d delayed, %d dead", q.Queue, q.Pending, q.Leased, q.Delayed, q.Dead)
		if q.NextDeadline != nil {
			fmt.Fprintf(w, ", next deadline in %v", time.Duration(*q.NextDeadline*float64(time.Second)).Round(time.Second))
		}
		fmt.Fprintln(w)
	}
}

func newResults(p process) *cobra.Command {
	var c dispatchClient
	var list string
	var count int
	var limit time.Duration
	cmd := &cobra.Command{
		Use: "results", Short: "Take results off a list, one JSON object per line", Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			bar := newProgress(p.stderr, "results", count)
			defer bar.end()
			until := time.Now().Add(limit)
			for n := 0; n < count; {
				ask := map[string]any{"max": min(1000, count-n), "wait_ms": 1000}
				if list != "" {
					ask["list"] = list
				}
				body, err := json.Marshal(ask)
				if err != nil {
					return err
				}
				var answer struct{ Results []json.RawMessage }
				if err := c.ask(cmd.Context(), "results", body, &answer); err != nil {
					return err
				}
				for _, r := range answer.Results {
					fmt.Fprintf(p.stdout, "%s\n", r)
				}
				n += len(answer.Results)
				bar.show(n)
				if n < count && !time.Now().Before(until) {
					return failure{fmt.Errorf("%d of %d results within %v", n, count, limit)}
				}
			}
			return nil
		},
	}
	c.flags(cmd)
	cmd.Flags().StringVar(&list, "list", "", "the list; the dispatcher's if not given")
	cmd.Flags().IntVar(&count, "count", 1, "how many results to wait for")
	cmd.Flags().DurationVar(&limit, "wait", time.Hour, "how long")
	return cmd
}

func newCancel(p process) *cobra.Command {
	var c dispatchClient
	cmd := &cobra.Command{
		Use: "cancel ID...", Short: "Cancel requests, in flight or not", Args: cobra.MinimumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			body, err := json.Marshal(map[string]any{"ids": args})
			if err != nil {
				return err
			}
			var answer struct{ Cancelling int }
			if err := c.ask(cmd.Context(), "cancel", body, &answer); err != nil {
				return err
			}
			fmt.Fprintf(p.stdout, "cancelling %d of %d; the others are unknown or have their result\n", answer.Cancelling, len(args))
			return nil
		},
	}
	c.flags(cmd)
	return cmd
}
