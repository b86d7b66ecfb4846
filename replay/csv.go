package replay

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"time"
)

// csvColumns remembers where the columns of a CSV are and, when arrivals are dates, the first one.
type csvColumns struct {
	arrival, input, output int
	known                  bool
	epoch                  time.Time
}

// csvNames are the column names understood, in lower case without spaces and underscores, those of
// the Azure and BurstGPT traces among them.
func csvNames(name string) string {
	switch strings.NewReplacer(" ", "", "_", "", "-", "").Replace(strings.ToLower(name)) {
	case "arrival", "arrivaltime", "arrivedat", "timestamp", "time":
		return "arrival"
	case "input", "inputlength", "inputtokens", "isl", "prompttokens", "requesttokens", "contexttokens":
		return "input"
	case "output", "outputlength", "outputtokens", "osl", "completiontokens", "responsetokens", "generatedtokens":
		return "output"
	}
	return ""
}

func (c *csvColumns) parse(line []byte) (Request, bool, error) {
	fields := strings.Split(string(line), ",")
	for i, f := range fields {
		fields[i] = strings.Trim(strings.TrimSpace(f), `"`)
	}
	if !c.known {
		c.known = true
		header, err := c.locate(fields)
		if header || err != nil {
			return Request{}, header, err
		}
	}
	if need := max(c.arrival, c.input, c.output) + 1; len(fields) < need {
		return Request{}, false, fmt.Errorf("%d columns where %d are needed", len(fields), need)
	}
	seconds, err := c.seconds(fields[c.arrival])
	if err != nil {
		return Request{}, false, err
	}
	var req Request
	if req.ISLTokens, err = strconv.Atoi(fields[c.input]); err != nil {
		return Request{}, false, fmt.Errorf("input tokens: %q is not a whole number", fields[c.input])
	}
	if req.OSLTokens, err = strconv.Atoi(fields[c.output]); err != nil {
		return Request{}, false, fmt.Errorf("output tokens: %q is not a whole number", fields[c.output])
	}
	err = req.setAndCheck(seconds)
	return req, false, err
}

// locate sets the columns from the first line and says whether it was a header: it is one when its
// first field begins with a letter.
func (c *csvColumns) locate(fields []string) (header bool, err error) {
	c.arrival, c.input, c.output = 0, 1, 2
	if fields[0] == "" || !isLetter(fields[0][0]) {
		return false, nil
	}
	c.arrival, c.input, c.output = -1, -1, -1
	for i, f := range fields {
		switch csvNames(f) {
		case "arrival":
			c.arrival = i
		case "input":
			c.input = i
		case "output":
			c.output = i
		}
	}
	if min(c.arrival, c.input, c.output) < 0 {
		return true, errors.New("the header does not name columns for arrival, input and output")
	}
	return true, nil
}

func isLetter(b byte) bool { return b|0x20 >= 'a' && b|0x20 <= 'z' }

// seconds reads an arrival. Dates count from the first one; an earlier one is an error.
func (c *csvColumns) seconds(field string) (float64, error) {
	if v, err := strconv.ParseFloat(field, 64); err == nil {
		return v, nil
	}
	for _, layout := range []string{"2006-01-02 15:04:05", time.RFC3339} { // fractions are accepted by both
		at, err := time.Parse(layout, field)
		if err != nil {
			continue
		}
		if c.epoch.IsZero() {
			c.epoch = at
		}
		return at.Sub(c.epoch).Seconds(), nil
	}
	return 0, fmt.Errorf("arrival: %q is neither seconds nor a date", field)
}
