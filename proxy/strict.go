package proxy

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

	"spillway/httperr"
)

// bounds is an interval of numbers; over makes the lower end exclusive.
type bounds struct {
	low, high float64
	over      bool
	integer   bool
}

var inf = math.Inf(1)

// ranges are the sampling parameters that strict validation checks, by key.
var ranges = map[string]bounds{
	"temperature": {low: 0, high: 2}, "top_p": {low: 0, high: 1, over: true}, "top_k": {low: -1, high: inf, integer: true},
	"min_p": {low: 0, high: 1}, "frequency_penalty": {low: -2, high: 2}, "presence_penalty": {low: -2, high: 2},
	"length_penalty": {low: -2, high: 2}, "repetition_penalty": {low: 0, high: 2, over: true},
	"top_logprobs": {low: 0, high: 20, integer: true}, "best_of": {low: 0, high: 20, integer: true},
	"max_tokens": {low: 1, high: inf, integer: true}, "max_completion_tokens": {low: 1, high: inf, integer: true},
}

var completionLogprobs = bounds{low: 0, high: 5, integer: true}

// extensions are keys of engines that strict validation lets through everywhere.
var extensions = []string{
	"cache_salt", "stop_token_ids", "detokenize", "allowed_token_ids", "bad_words_token_ids", "logprob_token_ids", "nvext",
	"top_k", "min_p", "length_penalty", "repetition_penalty",
}

// known are the keys of each route by the OpenAI API.
var known = map[string]map[string]bool{
	"chat_completions": keys("messages model stream stream_options n temperature top_p max_tokens max_completion_tokens stop " +
		"frequency_penalty presence_penalty logit_bias logprobs top_logprobs user seed tools tool_choice parallel_tool_calls " +
		"response_format functions function_call audio modalities metadata prediction reasoning_effort service_tier store " +
		"web_search_options verbosity safety_identifier prompt_cache_key"),
	"completions": keys("model prompt prompt_embeds stream stream_options n temperature top_p max_tokens stop best_of echo " +
		"frequency_penalty presence_penalty logit_bias logprobs seed suffix user"),
	"embeddings": keys("model input dimensions encoding_format user n"),
}

func keys(words string) map[string]bool {
	m := map[string]bool{}
	for _, w := range slices.Concat(strings.Fields(words), extensions) {
		m[w] = true
	}
	return m
}

// Limits of strict validation.
const (
	maxStop         = 32
	maxTools        = 1536
	maxFunctionName = 128
	maxPrompts      = 128 // times n
)

// strict judges a body, which is known to be a JSON object, by the rules of --strict-validation.
func strict(ep *endpoint, body []byte) *httperr.Error {
	var f map[string]json.RawMessage
	if err := json.Unmarshal(body, &f); err != nil {
		return httperr.Invalid("the request body is not valid JSON")
	}
	unknown := unknownKeys(ep, f)
	// null is how some clients spell "not set"
	maps.DeleteFunc(f, func(_ string, raw json.RawMessage) bool { return string(raw) == "null" })
	for _, legacy := range []string{"functions", "function_call"} {
		if f[legacy] != nil {
			return httperr.New(501, "Validation: "+legacy+" is not supported, use tools")
		}
	}
	if unknown != "" {
		return httperr.Invalid("unknown fields: %s", unknown)
	}
	for _, check := range []func(*endpoint, map[string]json.RawMessage) error{
		checkRanges, checkBias, checkStop, checkTools, checkPrompts, checkUser,
	} {
		if err := check(ep, f); err != nil {
			return httperr.Invalid("%v", err)
		}
	}
	return nil
}

// The bounds of what an error message repeats of a body.
const (
	maxListed    = 20
	maxListedKey = 64 // bytes
)

// unknownKeys lists the keys that the route does not have, "" if there are none.
func unknownKeys(ep *endpoint, f map[string]json.RawMessage) string {
	var unknown []string
	for key := range f {
		if known[ep.label][key] {
			continue
		}
		if len(key) > maxListedKey {
			key = strings.ToValidUTF8(key[:maxListedKey], "") + "..."
		}
		unknown = append(unknown, strconv.Quote(key))
	}
	slices.Sort(unknown)
	list := strings.Join(unknown[:min(len(unknown), maxListed)], ", ")
	if more := len(unknown) - maxListed; more > 0 {
		list += fmt.Sprintf(" and %d more", more)
	}
	return list
}

func checkRanges(ep *endpoint, f map[string]json.RawMessage) error {
	for _, key := range slices.Sorted(maps.Keys(ranges)) {
		if err := ranges[key].check(key, f[key]); err != nil {
			return err
		}
	}
	if ep.label == "completions" {
		return completionLogprobs.check("logprobs", f["logprobs"])
	}
	return nil
}

func (b bounds) check(key string, raw json.RawMessage) error {
	if raw == nil {
		return nil
	}
	v, err := strconv.ParseFloat(string(raw), 64)
	switch {
	case err != nil && !math.IsInf(v, 0): // an infinite one is only too large
		return fmt.Errorf("%s must be a number", key)
	case b.integer && (v != math.Trunc(v) || math.IsInf(v, 0)):
		return fmt.Errorf("%s must be an integer", key)
	case b.over && (v <= b.low || v > b.high):
		return fmt.Errorf("%s must be greater than %v and at most %v", key, b.low, b.high)
	case v < b.low && math.IsInf(b.high, 1):
		return fmt.Errorf("%s must be at least %v", key, b.low)
	case v < b.low || v > b.high:
		return fmt.Errorf("%s must be from %v to %v", key, b.low, b.high)
	}
	return nil
}

func checkBias(_ *endpoint, f map[string]json.RawMessage) error {
	var bias map[string]float64
	if f["logit_bias"] != nil && json.Unmarshal(f["logit_bias"], &bias) != nil {
		return errors.New("logit_bias must map token IDs to numbers")
	}
	for _, v := range bias {
		if v < -100 || v > 100 {
			return errors.New("logit_bias values must be from -100 to 100")
		}
	}
	return nil
}

func checkStop(_ *endpoint, f map[string]json.RawMessage) error {
	if f["stop"] == nil {
		return nil
	}
	var one string
	var list []string
	if json.Unmarshal(f["stop"], &one) == nil {
		list = []string{one}
	} else if json.Unmarshal(f["stop"], &list) != nil {
		return errors.New("stop must be a string or an array of strings")
	}
	if len(list) == 0 || len(list) > maxStop || slices.Contains(list, "") {
		return fmt.Errorf("stop must have 1 to %d entries, none of them empty", maxStop)
	}
	return nil
}

func checkTools(_ *endpoint, f map[string]json.RawMessage) error {
	if f["tools"] == nil {
		return nil
	}
	var tools []map[string]json.RawMessage // not structs: those match keys in any case
	if json.Unmarshal(f["tools"], &tools) != nil {
		return errors.New("tools must be an array of tools")
	}
	if len(tools) > maxTools {
		return fmt.Errorf("tools must have at most %d entries", maxTools)
	}
	for _, t := range tools {
		var function map[string]json.RawMessage
		var name string
		if t["function"] != nil && json.Unmarshal(t["function"], &function) != nil {
			return errors.New("function of a tool must be an object")
		}
		if function["name"] != nil && json.Unmarshal(function["name"], &name) != nil {
			return errors.New("name of a function must be a string")
		}
		if utf8.RuneCountInString(name) > maxFunctionName {
			return fmt.Errorf("a function name must have at most %d characters", maxFunctionName)
		}
	}
	return nil
}

func checkPrompts(_ *endpoint, f map[string]json.RawMessage) error {
	n := 1
	if f["n"] != nil {
		n, _ = strconv.Atoi(string(f["n"])) // its form has been checked
	}
	if t, err := strconv.ParseFloat(string(f["temperature"]), 64); err == nil && t == 0 && n > 1 {
		return errors.New("n must be 1 when temperature is 0")
	}
	var list []json.RawMessage
	if json.Unmarshal(f["prompt"], &list) != nil || len(list) == 0 || kindOf(list[0][0]) == numeric {
		return nil // one prompt, whatever its form
	}
	if len(list)*n > maxPrompts {
		return fmt.Errorf("prompts times n must be at most %d", maxPrompts)
	}
	return nil
}

func checkUser(_ *endpoint, f map[string]json.RawMessage) error {
	var user string
	if f["user"] == nil {
		return nil
	}
	if json.Unmarshal(f["user"], &user) != nil || strings.TrimSpace(user) == "" {
		return errors.New("user must be a string that is not blank")
	}
	return nil
}
