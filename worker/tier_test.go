package worker_test

import (
	"testing"

	"spillway/worker"
)

func TestTierNames(t *testing.T) {
	want := []string{"device", "host_pinned", "disk", "external"}
	if len(want) != worker.Tiers {
		t.Fatalf("there are %d tiers", worker.Tiers)
	}
	for i, name := range want {
		tier := worker.Tier(i)
		if got, err := worker.ParseTier(name); tier.String() != name || got != tier || err != nil {
			t.Errorf("tier %d is %q, and %q is %v, %v", i, tier, name, got, err)
		}
	}
	for _, name := range []string{"", "Device", "gpu", "tier 4"} {
		if got, err := worker.ParseTier(name); err == nil {
			t.Errorf("ParseTier(%q) = %v, want an error", name, got)
		}
	}
	if got := worker.Tier(4).String(); got != "tier 4" {
		t.Errorf("a tier that is none is %q", got)
	}
}
