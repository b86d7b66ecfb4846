package worker

import (
	"errors"
	"fmt"
	"reflect"
	"strings"
)

// Custom says which series of a metrics page mean what, for an engine that Spillway does not
// know. Values are written name{label=value,...}, with or without quotes; "" is not there. The
// page needs to tell how full the KV cache is: by a fraction, or in blocks or tokens.
type Custom struct {
	KVUsage       string `koanf:"kv_usage"`        // fraction in use, 0 to 1
	KVUsedBlocks  string `koanf:"kv_used_blocks"`  // blocks in use
	KVTotalBlocks string `koanf:"kv_total_blocks"` // blocks of a rank
	BlockSize     string `koanf:"block_size"`      // tokens per block
	KVUsedTokens  string `koanf:"kv_used_tokens"`  // tokens in use
	KVTotalTokens string `koanf:"kv_total_tokens"` // tokens that a rank has room for
	Running       string `koanf:"running"`         // requests
	Waiting       string `koanf:"waiting"`         // requests
	PrefillTokens string `koanf:"prefill_tokens"`  // prompt tokens that wait for prefill

	RankLabel      string `koanf:"rank_label"`       // label that holds the data-parallel rank; "" is one rank
	CacheInfo      string `koanf:"cache_info"`       // series that says the following in its labels
	BlockSizeLabel string `koanf:"block_size_label"` // tokens per block
	NumBlocksLabel string `koanf:"num_blocks_label"` // blocks of a rank
}

// check reports the first key that makes no sense.
func (c Custom) check() error {
	v := reflect.ValueOf(c)
	for i := range v.NumField() {
		key, text := v.Type().Field(i).Tag.Get("koanf"), v.Field(i).String()
		switch {
		case text == "":
		case strings.HasSuffix(key, "_label"):
			if !isName(text, false) {
				return fmt.Errorf("%s: %q is not the name of a label", key, text)
			}
		default:
			if _, err := ParseSeries(text); err != nil {
				return fmt.Errorf("%s: %w", key, err)
			}
		}
	}
	labels := c.BlockSizeLabel != "" || c.NumBlocksLabel != ""
	blocks := c.KVTotalBlocks != "" || c.CacheInfo != "" && c.NumBlocksLabel != ""
	switch {
	case (c.CacheInfo != "") != labels:
		return errors.New("cache_info: needs block_size_label or num_blocks_label, and they need it")
	case c.KVUsage == "" && c.KVUsedBlocks == "" && c.KVUsedTokens == "":
		return errors.New("kv_usage: nothing tells how full the cache is; give it, kv_used_blocks or kv_used_tokens")
	case c.KVUsage == "" && c.KVUsedTokens == "" && !blocks:
		return errors.New("kv_used_blocks: needs kv_total_blocks, or cache_info and num_blocks_label")
	case c.KVUsage == "" && c.KVUsedBlocks == "" && c.KVTotalTokens == "" && !blocks:
		return errors.New("kv_used_tokens: needs kv_total_tokens or kv_total_blocks")
	}
	return nil
}

// Series names one series of a metrics page, or all those of a name that have the labels.
type Series struct {
	Name   string
	Labels []Label
}

// Label is a label and the value that it must have. "" is also what a missing label has.
type Label struct{ Name, Value string }

// ParseSeries reads name, name{}, or name{label=value,label="value"}.
func ParseSeries(text string) (Series, error) {
	name, rest, braced := strings.Cut(strings.TrimSpace(text), "{")
	s := Series{Name: strings.TrimSpace(name)}
	if !isName(s.Name, true) {
		return Series{}, fmt.Errorf("%q does not begin with the name of a metric", text)
	}
	if !braced {
		return s, nil
	}
	for rest = strings.TrimSpace(rest); rest != "}"; {
		label, value, ok := strings.Cut(rest, "=")
		if label = strings.TrimSpace(label); !ok || !isName(label, false) {
			return Series{}, fmt.Errorf("%q needs label=value in its braces, and a closing one", text)
		}
		if value, rest, ok = cutValue(strings.TrimSpace(value)); !ok {
			return Series{}, fmt.Errorf("%q: the value of %s does not end", text, label)
		}
		s.Labels = append(s.Labels, Label{label, value})
		rest = strings.TrimSpace(rest)
		if after, ok := strings.CutPrefix(rest, ","); ok {
			rest = strings.TrimSpace(after)
		} else if rest != "}" {
			return Series{}, fmt.Errorf("%q: %q does not belong after the value of %s", text, rest, label)
		}
	}
	return s, nil
}

// cutValue reads the value that text begins with, in quotes or up to a comma or brace.
func cutValue(text string) (value, rest string, ok bool) {
	if !strings.HasPrefix(text, `"`) {
		end := strings.IndexAny(text, `,}`)
		if end < 0 || strings.Contains(text[:end], `"`) {
			return "", "", false
		}
		return strings.TrimSpace(text[:end]), text[end:], true
	}
	var b strings.Builder
	for i := 1; i < len(text); i++ {
		switch c := text[i]; {
		case c == '"':
			return b.String(), text[i+1:], true
		case c == '\\' && i+1 < len(text):
			i++
			if text[i] == 'n' {
				b.WriteByte('\n')
			} else {
				b.WriteByte(text[i])
			}
		default:
			b.WriteByte(c)
		}
	}
	return "", "", false
}

// isName tells whether text may be the name of a label, or of a metric, where colons may be too.
func isName(text string, metric bool) bool {
	for i, c := range []byte(text) {
		letter := c == '_' || 'a' <= c && c <= 'z' || 'A' <= c && c <= 'Z' || metric && c == ':'
		if !letter && (i == 0 || c < '0' || c > '9') {
			return false
		}
	}
	return text != ""
}
