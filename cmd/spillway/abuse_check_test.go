package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"

	"spillway/httperr"
)

// whole is the outcome of a request that got all it asked for.
const whole = "200"

// errorBody is the documented body of an error.
type errorBody struct {
	Message string `json:"message"`
	Type    string `json:"type"`
	Code    int    `json:"code"`
}

// failures are what a good request may be told, by status and X-Spillway-Reason. What is not
// among them, such as an "Internal server error" or a 400, must not happen.
func failures(r *request) map[string][]string {
	const failed = "The worker failed to process the request"
	late := []string{failed, "The worker did not answer in time", "The request took longer than its limit"}
	all := map[string][]string{
		"500":                    {failed},
		"502":                    {failed, "The worker could not be reached or broke the connection"},
		"504":                    late,
		"503":                    {"Service temporarily unavailable: the worker is not available"},
		"503 overloaded":         {httperr.BusyMessage},
		"503 worker-overloaded":  {httperr.BusyMessage},
		"503 no-healthy-workers": {"Service temporarily unavailable: No workers available for model sim-model"},
	}
	if r.pinned {
		all["503 overloaded-pinned"] = []string{httperr.PinnedBusyMessage}
		all["400"] = []string{"Validation: the pinned worker or rank does not serve the model"}
	}
	return all
}

// judge tells what an answer is, and what is wrong with it.
func (r *request) judge(resp *http.Response, body string, err error) (outcome string, problem error) {
	outcome = fmt.Sprint(resp.StatusCode)
	if reason := resp.Header.Get("X-Spillway-Reason"); reason != "" {
		outcome += " " + reason
	}
	if resp.Header.Get("X-Request-Id") == "" && strings.HasPrefix(r.path, "/v1/c") && r.status != 405 {
		return outcome, errors.New("no X-Request-Id")
	}
	switch {
	case resp.StatusCode != http.StatusOK:
		if err != nil {
			return outcome, fmt.Errorf("status %d, and then %w", resp.StatusCode, err)
		}
		return outcome, r.judgeError(resp, outcome, body)
	case r.status != 0:
		return outcome, fmt.Errorf("200 to a request that deserves %d: %.500s", r.status, body)
	case r.stream:
		return judgeStream(resp, body, err)
	}
	return judgeWhole(resp, body, err)
}

func (r *request) judgeError(resp *http.Response, outcome, body string) error {
	var e errorBody
	d := json.NewDecoder(strings.NewReader(body))
	d.DisallowUnknownFields()
	if err := d.Decode(&e); err != nil || e.Message == "" || e.Code != resp.StatusCode || e.Type != httperr.Slug(resp.StatusCode) ||
		resp.Header.Get("Content-Type") != "application/json" {
		return fmt.Errorf("%s is not of the documented shape (%v): %.500s", outcome, err, body)
	}
	refusal := strings.Contains(outcome, "overloaded") || strings.Contains(outcome, "no-healthy")
	if got := resp.Header.Get("Retry-After"); (got != "") != refusal {
		return fmt.Errorf("%s with Retry-After %q", outcome, got)
	}
	if r.status != 0 {
		if outcome != fmt.Sprint(r.status) {
			return fmt.Errorf("%s to a request that deserves %d: %s", outcome, r.status, body)
		}
		return nil
	}
	for _, m := range failures(r)[outcome] {
		if e.Message == m {
			return nil
		}
	}
	return fmt.Errorf("%s to a good request: %s", outcome, body)
}

// judgeStream takes a stream that ends with [DONE], with all that was asked for or with an error
// event before it.
func judgeStream(resp *http.Response, body string, err error) (outcome string, problem error) {
	if err != nil {
		return "stream cut", fmt.Errorf("a stream ends with %w after %.300q", err, last(body))
	}
	if !strings.HasPrefix(resp.Header.Get("Content-Type"), "text/event-stream") {
		return "no stream", fmt.Errorf("a stream of type %q: %.500s", resp.Header.Get("Content-Type"), body)
	}
	events, ok := strings.CutSuffix(body, "data: [DONE]\n\n")
	if !ok {
		return "stream without [DONE]", fmt.Errorf("a stream ends with %q", last(body))
	}
	finished, failed, garbage := false, false, false
	for event := range strings.SplitSeq(strings.TrimSuffix(events, "\n\n"), "\n\n") {
		data, ok := strings.CutPrefix(event, "data: ")
		if !ok {
			if event != "" && event != ":" {
				return "bad event", fmt.Errorf("an event is %.300q", event)
			}
			continue
		}
		var chunk struct {
			Error   *errorBody `json:"error"`
			Choices []struct {
				Finish *string `json:"finish_reason"`
			} `json:"choices"`
		}
		if json.Unmarshal([]byte(data), &chunk) != nil {
			if !strings.Contains(data, "\x00\xff") { // the one that the simulated worker makes
				return "bad event", fmt.Errorf("an event is %.300q", event)
			}
			garbage = true
			continue
		}
		if chunk.Error != nil {
			failed = true
			if chunk.Error.Message == "" || chunk.Error.Code < 400 {
				return "bad event", fmt.Errorf("an error event is %.300q", event)
			}
		}
		finished = finished || len(chunk.Choices) > 0 && chunk.Choices[0].Finish != nil
	}
	switch {
	case failed:
		return "200, then an error event", nil
	case !finished:
		return "stream without an end", fmt.Errorf("a stream has neither an end nor an error: %q", last(body))
	case garbage:
		return "200 with a worker's garbage", nil
	}
	return whole, nil
}

func last(body string) string { return body[max(0, len(body)-200):] }

// judgeWhole takes an answer that is no stream. Whether it makes sense is between worker and
// client, so it may be the worker's error or half a value; it may be cut only where it is too
// long to be held back.
func judgeWhole(resp *http.Response, body string, err error) (outcome string, problem error) {
	if err != nil {
		if len(body) <= 1<<20 {
			return "answer cut", fmt.Errorf("an answer of %d bytes ends with %w: %.300q", len(body), err, last(body))
		}
		return "200, cut after a MiB", nil
	}
	if resp.Header.Get("X-Spillway-Worker") == "" {
		return "no worker", fmt.Errorf("an answer without X-Spillway-Worker: %.500s", body)
	}
	var answer struct {
		Error   *errorBody        `json:"error"`
		Choices []json.RawMessage `json:"choices"`
		Data    []json.RawMessage `json:"data"`
	}
	switch err := json.NewDecoder(strings.NewReader(body)).Decode(&answer); {
	case errors.Is(err, io.ErrUnexpectedEOF):
		return "200 of a worker's half answer", nil
	case err != nil:
		return "no JSON", fmt.Errorf("an answer is %.500q: %w", body, err)
	case answer.Error != nil:
		return "200 of a worker's error", nil
	case len(answer.Choices)+len(answer.Data) == 0:
		return "empty", fmt.Errorf("an answer has nothing: %.500s", body)
	}
	return whole, nil
}
