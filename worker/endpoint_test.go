package worker_test

import (
	"maps"
	"strings"
	"testing"

	"spillway/worker"
)

func TestCheckEventEndpoint(t *testing.T) {
	for _, tt := range []struct{ endpoint, want string }{
		{"tcp://*:5558", ""},
		{"tcp://127.0.0.1:0", ""},
		{"tcp://[::1]:5557", ""},
		{"tcp://gpu-1.cluster.local:65535", ""},
		{"inproc://listener", ""},
		{"ipc:///run/x.sock", ""},
		{"tcp://host", "missing TCP port"},
		{"tcp://:5558", "missing TCP host"},
		{"udp://host:5558", "unsupported scheme"},
		{"TCP://host:5558", "unsupported scheme"},
		{"://host:5558", "unsupported scheme"},
		{"not-an-endpoint", "missing scheme"},
		{"", "missing scheme"},
		{"tcp://", "missing address"},
		{"ipc://", "missing address"},
		{"tcp://host:", "invalid TCP port"},
		{"tcp://host:65536", "invalid TCP port"},
		{"tcp://host:-1", "invalid TCP port"},
		{"tcp://host:+1", "invalid TCP port"},
		{"tcp://host:5557/x", "invalid TCP port"},
		{"tcp://[::1:5557", "missing closing `]`"},
		{"tcp://::1:5557", "missing TCP port"},
		{"tcp://h\x00st:1", "a zero byte"},
		{"ipc://x\x00", "a zero byte"},
	} {
		err := worker.CheckEventEndpoint(tt.endpoint)
		switch {
		case tt.want == "" && err != nil:
			t.Errorf("CheckEventEndpoint(%q) = %v, want nil", tt.endpoint, err)
		case tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)):
			t.Errorf("CheckEventEndpoint(%q) = %v, want %q", tt.endpoint, err, tt.want)
		}
	}
	if err := worker.CheckEventEndpoint("tcp://host"); err == nil || !strings.Contains(err.Error(), `"tcp://host"`) {
		t.Errorf("CheckEventEndpoint = %v, which does not name the endpoint", err)
	}
}

func TestBinds(t *testing.T) {
	for endpoint, want := range map[string]bool{
		"tcp://*:5557": true, "tcp://host:5557": false, "ipc://*": false, "tcp://*.example:5557": false,
	} {
		if got := worker.Binds(endpoint); got != want {
			t.Errorf("Binds(%q) = %v, want %v", endpoint, got, want)
		}
	}
}

func TestReplayEndpoint(t *testing.T) {
	for _, tt := range []struct {
		endpoint string
		offset   uint32
		want     string // "": an error
	}{
		{"tcp://h:6000", 0, "tcp://h:6000"},
		{"tcp://h:6000", 3, "tcp://h:6003"},
		{"tcp://[::1]:6000", 1, "tcp://[::1]:6001"},
		{"tcp://h:65534", 1, "tcp://h:65535"},
		{"tcp://h:65535", 1, ""},
		{"tcp://h:1", 1<<32 - 1, ""},
		{"tcp://h:0", 1, ""},
		{"tcp://h:0", 0, "tcp://h:0"},
		{"inproc://replay", 2, "inproc://replay_dp2"},
		{"ipc:///run/replay", 1, ""},
		{"ipc:///run/replay", 0, "ipc:///run/replay"},
	} {
		got, err := worker.ReplayEndpoint(tt.endpoint, tt.offset)
		if got != tt.want || (err == nil) != (tt.want != "") {
			t.Errorf("ReplayEndpoint(%q, %d) = %q, %v, want %q", tt.endpoint, tt.offset, got, err, tt.want)
		}
	}
}

// TestKVEndpoints checks what is made of the keys that tell where KV events come from, and whether
// all ranks are heard of then.
func TestKVEndpoints(t *testing.T) {
	type at = map[uint32]string
	for _, tt := range []struct {
		name           string
		given          worker.Worker
		events, replay at
		all            bool
	}{
		{"nothing", worker.Worker{}, nil, nil, false},
		{"one", worker.Worker{KVEventsEndpoint: "tcp://h:1"}, at{0: "tcp://h:1"}, nil, true},
		{"one, of the only declared rank", worker.Worker{KVEventsEndpoint: "tcp://h:1", DPStart: 3, DPSize: 1}, at{3: "tcp://h:1"}, nil, true},
		{"one for two ranks", worker.Worker{KVEventsEndpoint: "tcp://h:1", DPSize: 2}, nil, nil, false},
		{"a map goes first", worker.Worker{KVEventsEndpoint: "tcp://h:1", KVEvents: at{0: "tcp://h:2"}}, at{0: "tcp://h:2"}, nil, true},
		{"two of two", worker.Worker{KVEvents: at{4: "tcp://h:2", 5: "tcp://h:3"}, DPStart: 4, DPSize: 2}, at{4: "tcp://h:2", 5: "tcp://h:3"}, nil, true},
		{"one of two", worker.Worker{KVEvents: at{0: "tcp://h:2"}, DPSize: 2}, at{0: "tcp://h:2"}, nil, false},
		{"two, of others", worker.Worker{KVEvents: at{0: "tcp://h:2", 1: "tcp://h:3"}, DPStart: 1, DPSize: 2}, at{0: "tcp://h:2", 1: "tcp://h:3"}, nil, false},
		{"more than declared", worker.Worker{KVEvents: at{0: "tcp://h:2", 9: "tcp://h:3"}, DPSize: 1}, at{0: "tcp://h:2", 9: "tcp://h:3"}, nil, true},
		{"replay by convention", worker.Worker{KVEvents: at{4: "tcp://h:2", 6: "tcp://h:3"}, DPStart: 4, DPSize: 3, ReplayEndpoint: "tcp://h:7"}, at{4: "tcp://h:2", 6: "tcp://h:3"}, at{4: "tcp://h:7", 6: "tcp://h:9"}, false},
		{"replay, with exceptions", worker.Worker{KVEvents: at{0: "tcp://h:2", 1: "tcp://h:3"}, DPSize: 2, ReplayEndpoint: "tcp://h:7", KVReplay: at{1: ""}}, at{0: "tcp://h:2", 1: "tcp://h:3"}, at{0: "tcp://h:7", 1: ""}, true},
		{"no replay by convention", worker.Worker{KVEvents: at{0: "ipc://a", 1: "ipc://b"}, DPSize: 2, ReplayEndpoint: "ipc://c"}, at{0: "ipc://a", 1: "ipc://b"}, at{0: "ipc://c"}, true},
	} {
		tt.given.Endpoint = "http://h:1"
		got, err := tt.given.Normalize()
		if err != nil || !maps.Equal(got.KVEvents, tt.events) || !maps.Equal(got.KVReplay, tt.replay) || got.PublishesKVEvents() != tt.all {
			t.Errorf("%s: events %v, replay %v, all %v, %v; want %v, %v, %v", tt.name, got.KVEvents, got.KVReplay, got.PublishesKVEvents(), err, tt.events, tt.replay, tt.all)
		}
	}
	silent, heard := &worker.Worker{}, &worker.Worker{KVEvents: at{0: "tcp://h:1"}}
	for _, tt := range []struct {
		workers []*worker.Worker
		want    bool
	}{{nil, false}, {[]*worker.Worker{heard}, true}, {[]*worker.Worker{heard, heard}, true}, {[]*worker.Worker{heard, silent}, false}} {
		if got := worker.AllPublishKVEvents(tt.workers); got != tt.want {
			t.Errorf("AllPublishKVEvents of %d workers = %v, want %v", len(tt.workers), got, tt.want)
		}
	}
}
