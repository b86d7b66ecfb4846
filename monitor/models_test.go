package monitor_test

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"spillway/busy"
	"spillway/monitor"
	"spillway/worker"
)

func TestNamesAreLearnt(t *testing.T) {
	models := func(names string, length int) string {
		var out []string
		for _, n := range strings.Fields(names) {
			parent, root := "null", "/models/base"
			if strings.HasPrefix(n, "lora") {
				parent = `"base"`
			}
			n, other, is := strings.Cut(n, "@")
			switch {
			case is:
				root = other
			case strings.HasPrefix(n, "rootless"):
				root = ""
			}
			out = append(out, fmt.Sprintf(`{"id":%q,"root":%q,"parent":%s,"max_model_len":%d}`, n, root, parent, length))
		}
		return `{"object":"list","data":[` + strings.Join(out, ",") + `]}`
	}
	synctest.Test(t, func(t *testing.T) {
		net := newFake(map[string]string{"/metrics": goodPage, "/health": " "})
		r := newRig(monitor.DefaultConfig(), busy.Thresholds{})
		r.Via(net)
		var seen []string
		var refuse error
		r.Register = func(w *worker.Worker) (*busy.List, error) {
			seen = append(seen, fmt.Sprint(w.Models, w.MaxModelLen, w.Aliases))
			if refuse != nil {
				return nil, refuse
			}
			r.list.Register(w, time.Now())
			r.Watch(w, r.list) // a caller may do so
			return r.list, nil
		}
		w, err := worker.Worker{ID: 1, Endpoint: "http://worker"}.Normalize()
		if err != nil {
			t.Fatal(err)
		}
		r.Watch(&w, nil)
		r.run(t)
		time.Sleep(20 * time.Second)
		synctest.Wait()
		if got := net.gaps("/v1/models", 1); got != "250ms 500ms 1s 2s 4s 5s 5s" {
			t.Errorf("a worker without names is asked at %s", got)
		}
		if len(seen) > 0 || net.count("/metrics") > 0 {
			t.Errorf("before it had names it was registered %q or scraped %d times", seen, net.count("/metrics"))
		}
		want := []string{}
		for _, step := range []struct {
			models string
			length int
			refuse error
			wait   time.Duration
			want   string // registered as, "" for not at all
		}{
			{"lora1 base alias base", 4096, errors.New("taken"), 5 * time.Second, "[base alias lora1] 4096 [alias]"},
			{"lora1 base alias base", 4096, nil, 5 * time.Second, "[base alias lora1] 4096 [alias]"},
			{"lora1 base alias", 4096, nil, 31 * time.Second, ""},
			{"base lora1 lora2", 4096, nil, 31 * time.Second, "[base lora1 lora2] 4096 []"},
			{"base lora1 lora2", 8192, nil, 31 * time.Second, "[base lora1 lora2] 8192 []"},
			{"", 0, nil, 31 * time.Second, ""},
			{"base lora1 loud", 8192, nil, 31 * time.Second, "[base loud lora1] 8192 [loud]"},
			{"base lora1 else@/models/else loud", 8192, nil, 31 * time.Second, "[base else loud lora1] 8192 [loud]"},
			{"base lora1 else@/models/else loud@/models/else", 8192, nil, 31 * time.Second, "[base else loud lora1] 8192 []"},
			{"rootless1 rootless2", 8192, nil, 31 * time.Second, "[rootless1 rootless2] 8192 []"},
			{"other", 8192, nil, 31 * time.Second, "[other] 8192 []"},
		} {
			refuse = step.refuse
			net.set("/v1/models", models(step.models, step.length))
			time.Sleep(step.wait)
			synctest.Wait()
			if step.want != "" {
				want = append(want, step.want)
			}
			if !slices.Equal(seen, want) {
				t.Fatalf("after %q registered %q, want %q", step.models, seen, want)
			}
		}
		if got := r.status(1); got != "free r0 870/1000" {
			t.Errorf("the worker that was named is %s", got)
		}
	})
}

// A worker that the operator has named keeps its names; only its context length is learnt.
func TestGivenNamesStay(t *testing.T) {
	models, err := os.ReadFile("testdata/sim_models.json")
	if err != nil {
		t.Fatal(err)
	}
	var seen []string
	set := func(r *rig) {
		r.Register = func(w *worker.Worker) (*busy.List, error) {
			seen = append(seen, fmt.Sprint(w.Models, w.MaxModelLen))
			return r.list, nil
		}
	}
	bubble(t, monitor.DefaultConfig(), map[string]string{"/v1/models": string(models)}, set, func(*rig, *fake, worker.ID) {
		time.Sleep(2 * time.Minute)
		synctest.Wait()
		if got := strings.Join(seen, " "); got != "[m] 131072" {
			t.Errorf("registered %q, want once [m] 131072", got)
		}
	})
}

// A record that the operator puts in place while another is being registered prevails, and has no aliases that
// are none of its names.
func TestNamesGivenMeanwhile(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r := newRig(monitor.DefaultConfig(), busy.Thresholds{})
		r.Via(newFake(map[string]string{"/v1/models": `{"data":[{"id":"learnt","root":"r","max_model_len":7},{"id":"alias","root":"r"}]}`}))
		var seen []string
		r.Register = func(w *worker.Worker) (*busy.List, error) {
			if seen = append(seen, fmt.Sprint(w.Models, w.Aliases)); len(seen) == 1 {
				given := *w
				given.Models, given.MaxModelLen = []string{"given"}, 0
				r.Watch(&given, r.list)
			}
			return r.list, nil
		}
		r.Watch(&worker.Worker{ID: 1, Name: "w", Endpoint: "http://worker"}, nil)
		stop := r.run(t)
		time.Sleep(2 * time.Minute)
		stop()
		if got := strings.Join(seen, " "); got != "[learnt alias] [alias] [given] []" {
			t.Errorf("registered %s, want [learnt alias] with [alias], and [given] with none", got)
		}
	})
}

func TestDiscover(t *testing.T) {
	simModels, err := os.ReadFile("testdata/sim_models.json")
	if err != nil {
		t.Fatal(err)
	}
	const sameRoot = `{"data":[{"id":"a","root":"r"},{"id":"b","root":"r"},{"id":"c","root":"other"}]}`
	for _, tt := range []struct {
		name, body string
		given      []string
		want       string // models, length, aliases, error
	}{
		{"spillway sim", string(simModels), nil, "[sim-model] 131072 [] <nil>"},
		{"given names stay", string(simModels), []string{"mine"}, "[mine] 131072 [] <nil>"},
		{"base models first", `{"data":[{"id":"l","parent":"a"},{"id":"a","parent":"","max_model_len":7},{"id":"b","max_model_len":9}]}`, nil, "[a b l] 7 [] <nil>"},
		{"no length", `{"data":[{"id":"a","max_model_len":null}]}`, nil, "[a] 0 [] <nil>"},
		{"a length that is none", `{"data":[{"id":"a","max_model_len":-1}]}`, nil, "[a] 0 [] <nil>"},
		{"no models", `{"data":[]}`, nil, "[] 0 [] monitor: the worker names no model: http://worker/v1/models"},
		{"not JSON", `<html>`, nil, "[] 0 [] monitor: asking for models: http://worker/v1/models: invalid character '<' looking for beginning of value"},
		{"no answer", ``, nil, `[] 0 [] monitor: asking for models: Get "http://worker/v1/models": refused`},
		{"aliases", sameRoot, nil, "[a b c] 0 [b] <nil>"},
		{"aliases of the first that was given", sameRoot, []string{"c", "a", "b", "mine"}, "[c a b mine] 0 [] <nil>"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := newRig(monitor.DefaultConfig(), busy.Thresholds{})
			r.Via(newFake(map[string]string{"/v1/models": tt.body}))
			w, err := r.Discover(t.Context(), worker.Worker{Endpoint: "http://worker", Models: tt.given})
			if got := fmt.Sprint(w.Models, w.MaxModelLen, w.Aliases, " ", err); strings.Join(strings.Fields(got), " ") != tt.want {
				t.Errorf("Discover of %s gives %s, want %s", tt.body, got, tt.want)
			}
		})
	}
}
