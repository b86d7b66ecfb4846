package replica_test

import (
	"fmt"
	"strings"
	"testing"

	"spillway/replica"
)

func TestConfig(t *testing.T) {
	many := make([]string, replica.MaxPeers+1)
	for i := range many {
		many[i] = fmt.Sprint("tcp://a:", i)
	}
	const ok = "tcp://0.0.0.0:8191"
	for _, tt := range []struct {
		name string
		cfg  replica.Config
		want string // how the error begins, "" for none
	}{
		{"default", replica.DefaultConfig(), ""},
		{"all", replica.Config{Bind: ok, Advertise: "tcp://a:1", Peers: []string{"tcp://b:1", "ipc:///tmp/x"}, Format: "group"}, ""},
		{"a peer twice", replica.Config{Bind: ok, Peers: append([]string{"tcp://a:0"}, many[:replica.MaxPeers]...), Format: "tenant"}, ""},
		{"format", replica.Config{Format: "v2"}, "replica-sync-format: "},
		{"queue", replica.Config{Format: "both", Queue: -1}, "replica-sync-queue: -1 is not within 1.."},
		{"endless queue", replica.Config{Format: "both", Queue: 1e9}, "replica-sync-queue: "},
		{"advertise alone", replica.Config{Advertise: ok, Format: "both"}, "replica-sync-advertise: needs "},
		{"peers alone", replica.Config{Peers: []string{ok}, Format: "both"}, "replica-sync-peers: needs "},
		{"bind", replica.Config{Bind: "0.0.0.0:8191", Format: "both"}, "replica-sync-bind: "},
		{"advertise", replica.Config{Bind: ok, Advertise: "tcp://a", Format: "both"}, "replica-sync-advertise: "},
		{"peer", replica.Config{Bind: ok, Peers: []string{"tcp://b:1", "tcp://b:x"}, Format: "both"}, "replica-sync-peers: "},
		{"an empty peer", replica.Config{Bind: ok, Peers: []string{"tcp://b:1", ""}, Format: "both"}, "replica-sync-peers: "},
		{"itself", replica.Config{Bind: ok, Advertise: "tcp://a:1", Peers: []string{"tcp://a:1"}, Format: "both"}, "replica-sync-peers: tcp://a:1 is "},
		{"too many", replica.Config{Bind: ok, Peers: many, Format: "both"}, "replica-sync-peers: 201 are more than 200"},
	} {
		if tt.cfg.Queue == 0 {
			tt.cfg.Queue = replica.DefaultConfig().Queue
		}
		err := tt.cfg.Validate()
		if (err == nil) != (tt.want == "") || err != nil && !strings.HasPrefix(err.Error(), tt.want) {
			t.Errorf("%s: Validate() = %v, want %q", tt.name, err, tt.want)
		}
		if got := tt.cfg.Enabled(); got != (tt.cfg.Bind != "") {
			t.Errorf("%s: Enabled() = %v", tt.name, got)
		}
	}
}
