package monitor

import (
	"bytes"
	"errors"
	"slices"

	"spillway/worker"
)

// dialect is how one engine writes its load down.
type dialect struct {
	prefixes   []string // of its names
	usage      string   // the series without which a page is of little use
	read       func(body []byte) page
	asksServer bool // the rest of what is needed is told by /get_server_info
}

// place is where a worker may tell its load.
type place struct {
	url      string
	accept   string
	dialects []*dialect // that may be spoken there
}

const (
	acceptText = "text/plain"
	acceptJSON = "application/json"
)

// placesOf lists where a worker's load may be found, in the order in which they are tried: the
// next one where the first does not exist.
func placesOf(w *worker.Worker, engine string) []place {
	vllm := &dialect{prefixes: []string{"vllm:"}, usage: "vllm:kv_cache_usage_perc", read: readVLLM}
	colon, underscore, trt := sglang("sglang:"), sglang("sglang_"), trtllm()
	page := place{w.MetricsURL, acceptText, []*dialect{vllm, colon, underscore, trt}}
	prometheus := place{w.Endpoint + "/prometheus/metrics", acceptText, []*dialect{trt}}
	loads := place{w.Endpoint + loadsPath, acceptJSON, []*dialect{sglangLoads}}
	elsewhere := w.MetricsURL != w.Endpoint+"/metrics" // the operator knows where
	switch engine {
	case "vllm":
		page.dialects = []*dialect{vllm}
		return []place{page}
	case "sglang":
		page.dialects = []*dialect{colon, underscore}
		return []place{page, loads}
	case "trtllm":
		if elsewhere {
			page.dialects = []*dialect{trt}
			return []place{page}
		}
		return []place{prometheus} // its /metrics is something else, and reading it takes it from others
	case "custom":
		page.dialects = []*dialect{custom(w.Custom)}
		return []place{page}
	}
	if elsewhere {
		return []place{page}
	}
	return []place{page, prometheus, loads}
}

// detect tells which of the dialects a page is written in: that whose usage series is there,
// else the first of which any name is there, else nil. One dialect alone is not asked.
func detect(body []byte, dialects []*dialect) *dialect {
	if len(dialects) == 1 {
		return dialects[0]
	}
	var usage, some = len(dialects), len(dialects)
	for len(body) > 0 && usage > 0 {
		line, rest, _ := bytes.Cut(body, []byte("\n"))
		body = rest
		line = skipBlanks(line)
		for i, d := range dialects {
			for _, prefix := range d.prefixes {
				if bytes.HasPrefix(line, []byte(prefix)) {
					some = min(some, i)
				}
			}
			if after, ok := bytes.CutPrefix(line, []byte(d.usage)); ok && (len(after) == 0 || !isNameByte(after[0])) {
				usage = min(usage, i)
			}
		}
	}
	switch {
	case usage < len(dialects):
		return dialects[usage]
	case some < len(dialects):
		return dialects[some]
	}
	return nil
}

// strangers is the number of pages in a row without any known name after which a worker's
// engine is looked for anew.
const strangers = 3

// whereabouts is what a scraper has found out about where and how its worker tells its load.
type whereabouts struct {
	places  []place
	at      int
	speaks  *dialect // nil until known
	unknown int      // pages in a row without any known name
}

// prepare lists the places when there are none yet. engine is that of workers that do not say.
func (h *whereabouts) prepare(w *worker.Worker, engine string) {
	if h.places != nil {
		return
	}
	if w.Engine != "auto" {
		engine = w.Engine
	}
	h.places = placesOf(w, engine)
}

func (h *whereabouts) place() place { return h.places[h.at] }

func (h *whereabouts) asksServer() bool { return h.speaks != nil && h.speaks.asksServer }

// notHere moves on to the next place, and reports whether that was the last one. A place that
// has something else is not asked again: it may be TensorRT-LLM's statistics, which reading takes
// away from others.
func (h *whereabouts) notHere(why error) (last bool) {
	h.speaks, h.unknown = nil, 0
	var f *failure
	if errors.As(why, &f) && f.reason == reasonMissing && len(h.places) > 1 {
		h.places = slices.Delete(h.places, h.at, h.at+1)
	} else {
		h.at++
	}
	if last = h.at == len(h.places); last {
		h.at = 0
	}
	return last
}

// read reads a page in the dialect that is spoken there, and names what it cannot do without.
func (h *whereabouts) read(body []byte) (p page, usage string) {
	if h.speaks == nil {
		h.speaks = detect(body, h.place().dialects)
	}
	if h.speaks != nil {
		usage = h.speaks.usage
		p = h.speaks.read(body)
	} else {
		usage = "metrics of vLLM, SGLang or TensorRT-LLM"
	}
	if p.known {
		h.unknown = 0
	} else if h.unknown++; h.unknown >= strangers {
		h.speaks, h.unknown, h.at = nil, 0, 0
	}
	return p, usage
}
