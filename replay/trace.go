package replay

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"
)

// BlockTokens is the number of prompt tokens that one hash id of a trace stands for.
const BlockTokens = 512

// maxLine bounds one line of a trace: a prompt of maxTokens has 32768 ids.
const maxLine = 1 << 20

// Request is one arrival: when, how long, and what its prompt is made of.
type Request struct {
	At        time.Duration // arrival: trace time as read, real time since the start once scheduled
	ISLTokens int           // prompt tokens, at least 1
	OSLTokens int           // output tokens, at least 1

	// Blocks are the ids of the prompt's blocks of BlockTokens tokens, the last of which may be
	// cut; equal ids are equal text. Nil means that no block is shared with any other request:
	// then Unique seeds the text.
	Blocks []uint64
	Unique uint64

	LeaveAfter time.Duration // the client goes this long after At; 0 stays to the end
}

// blockCount returns how many blocks hold tokens tokens.
func blockCount(tokens int) int { return (tokens + BlockTokens - 1) / BlockTokens }

// block returns the id of the i-th block of the prompt.
func (r *Request) block(i int) uint64 {
	if r.Blocks != nil {
		return r.Blocks[i]
	}
	return mix(r.Unique + uint64(i))
}

// ReadTrace reads a trace in format auto, mooncake or csv and returns its requests in order of
// arrival, the first at 0. An error names the line that it is about.
//
// A Mooncake line is a JSON object with timestamp (milliseconds), input_length, output_length and
// optionally hash_ids, one for each begun block of 512 input tokens. Other keys are ignored.
//
// A CSV line has arrival, input and output tokens, in this order or, if the first line is a header,
// in the columns whose names say so. Arrivals are seconds, or dates as in 2023-11-16 18:17:03.98.
func ReadTrace(r io.Reader, format string) ([]Request, error) {
	in := bufio.NewReader(r)
	if format == "auto" {
		format = sniff(in)
	}
	parse := parseMooncake // the bool says that the line was a header
	if format == "csv" {
		parse = new(csvColumns).parse
	}
	lines := bufio.NewScanner(in)
	lines.Buffer(make([]byte, 0, 64<<10), maxLine)
	var reqs []Request
	n := 0
	for lines.Scan() {
		n++
		line := bytes.TrimSpace(lines.Bytes())
		if len(line) == 0 {
			continue
		}
		req, header, err := parse(line)
		if err != nil {
			return nil, fmt.Errorf("replay: trace line %d: %w", n, err)
		}
		if header {
			continue
		}
		if len(reqs) == maxRequests {
			return nil, fmt.Errorf("replay: trace line %d: more than %d requests", n, maxRequests)
		}
		reqs = append(reqs, req)
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("replay: trace line %d: %w", n+1, err)
	}
	slices.SortStableFunc(reqs, byArrival)
	for i := len(reqs) - 1; i >= 0; i-- {
		reqs[i].At -= reqs[0].At
	}
	return reqs, nil
}

func byArrival(a, b Request) int {
	switch {
	case a.At < b.At:
		return -1
	case a.At > b.At:
		return 1
	}
	return 0
}

// sniff tells a Mooncake trace from a CSV by the brace that the former begins with.
func sniff(in *bufio.Reader) string {
	head, _ := in.Peek(512)
	if bytes.HasPrefix(bytes.TrimSpace(head), []byte("{")) {
		return "mooncake"
	}
	return "csv"
}

func parseMooncake(line []byte) (Request, bool, error) {
	var rec struct {
		Timestamp    *float64 `json:"timestamp"`
		InputLength  *int     `json:"input_length"`
		OutputLength *int     `json:"output_length"`
		HashIDs      []uint64 `json:"hash_ids"`
	}
	if err := json.Unmarshal(line, &rec); err != nil {
		return Request{}, false, err
	}
	switch {
	case rec.Timestamp == nil:
		return Request{}, false, errors.New("timestamp is missing")
	case rec.InputLength == nil:
		return Request{}, false, errors.New("input_length is missing")
	case rec.OutputLength == nil:
		return Request{}, false, errors.New("output_length is missing")
	}
	req := Request{ISLTokens: *rec.InputLength, OSLTokens: *rec.OutputLength}
	if len(rec.HashIDs) > 0 {
		req.Blocks = rec.HashIDs
	}
	err := req.setAndCheck(*rec.Timestamp / 1000)
	return req, false, err
}

// setAndCheck sets the arrival in seconds and checks all of r against the bounds.
func (r *Request) setAndCheck(seconds float64) error {
	if !(seconds >= 0 && seconds <= maxArrival.Seconds()) {
		return fmt.Errorf("arrival at %v s is not within 0..%v s", seconds, maxArrival.Seconds())
	}
	r.At = time.Duration(seconds * float64(time.Second))
	if r.ISLTokens < 1 || r.ISLTokens > maxTokens {
		return fmt.Errorf("input of %d tokens is not within 1..%d", r.ISLTokens, maxTokens)
	}
	if r.OSLTokens < 1 || r.OSLTokens > maxTokens {
		return fmt.Errorf("output of %d tokens is not within 1..%d", r.OSLTokens, maxTokens)
	}
	if want := blockCount(r.ISLTokens); r.Blocks != nil && len(r.Blocks) != want {
		return fmt.Errorf("%d hash_ids for the %d blocks of %d input tokens", len(r.Blocks), want, r.ISLTokens)
	}
	return nil
}
