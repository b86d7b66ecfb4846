package worker

import "fmt"

// Tier is the kind of memory that holds a KV block. The order is that in which a prefix is looked
// for: each tier can only extend what the ones before it hold.
type Tier uint8

// The tiers.
const (
	Device     Tier = iota // the accelerator's own memory
	HostPinned             // memory of the worker's host
	Disk                   // a disk of the worker's host
	External               // storage of others that the worker reads from
)

// Tiers is how many tiers there are.
const Tiers = 4

var tierNames = [Tiers]string{"device", "host_pinned", "disk", "external"}

// String is the name that dumps and metrics use.
func (t Tier) String() string {
	if t < Tiers {
		return tierNames[t]
	}
	return fmt.Sprintf("tier %d", uint8(t))
}

// ParseTier is the reverse of String. It fails for any other word.
func ParseTier(name string) (Tier, error) {
	for t, n := range tierNames {
		if n == name {
			return Tier(t), nil
		}
	}
	return 0, fmt.Errorf("unknown tier %q", name)
}
