package router

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"regexp"
	"slices"

	"go.yaml.in/yaml/v3"
)

// policyFile is a policy file as it is written (scheduler.md 10).
type policyFile struct {
	profileSection `yaml:",inline"`

	Models          map[string]*profileSection `yaml:"models"`
	WorkerSelection *selectionSection          `yaml:"worker_selection"`
}

// profileSection is one profile: all of its keys are there, or none.
type profileSection struct {
	DefaultFamily *string         `yaml:"default_policy_family"`
	Buckets       []bucketSection `yaml:"uncached_isl_buckets"`
	Classes       []classSection  `yaml:"policy_classes"`
}

type bucketSection struct {
	MinTokens *count `yaml:"min_tokens"`
	Bucket    string `yaml:"bucket"`
}

type classSection struct {
	Name              string   `yaml:"name"`
	Family            *string  `yaml:"policy_family"`
	Bucket            *string  `yaml:"cache_bucket"`
	Order             string   `yaml:"queue_policy"`
	Quantum           *count   `yaml:"quantum"`
	BusyPrefillTokens *count   `yaml:"prefill_busy_threshold"`
	BusyPrefillFrac   *float64 `yaml:"prefill_busy_threshold_frac"`
	MaxRequests       *count   `yaml:"request_queue_limit_per_worker"`
	MaxISLTokens      *count   `yaml:"raw_isl_token_queue_limit_per_worker"`
	MaxCachedTokens   *count   `yaml:"cached_token_queue_limit_per_worker"`
}

// selectionSection names the policies that choose workers (scheduler.md 17). There is one, the
// built-in, which is called default.
type selectionSection struct {
	Aggregated *string           `yaml:"aggregated"`
	Prefill    *string           `yaml:"prefill"`
	Decode     *string           `yaml:"decode"`
	Encode     *string           `yaml:"encode"`
	Instances  []instanceSection `yaml:"instances"`
}

type instanceSection struct {
	Name       string    `yaml:"name"`
	Type       string    `yaml:"type"`
	Parameters yaml.Node `yaml:"parameters"`
}

// count is a whole number. YAML's decoder alone would cut 1.5 down to 1.
type count uint64

// UnmarshalYAML implements yaml.Unmarshaler.
func (c *count) UnmarshalYAML(n *yaml.Node) error {
	if n.ShortTag() != "!!int" {
		return fmt.Errorf("line %d: %q is not a whole number of at least 0", n.Line, n.Value)
	}
	return n.Decode((*uint64)(c))
}

// policyName is what classes, families, buckets and instances may be called.
var policyName = regexp.MustCompile(`^[A-Za-z0-9_.-]+$`)

// BuiltInSelection names the one policy by which workers are chosen.
const BuiltInSelection = "default"

// ParsePolicies reads a policy file. Every error tells where in the file it is.
func ParsePolicies(b []byte) (*Policies, error) {
	dec := yaml.NewDecoder(bytes.NewReader(b))
	dec.KnownFields(true)
	var f policyFile
	if err := dec.Decode(&f); err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	if err := dec.Decode(new(yaml.Node)); !errors.Is(err, io.EOF) {
		return nil, errors.New("holds more than one YAML document")
	}
	p := &Policies{models: map[string]*Profile{}}
	var err error
	if !f.empty() {
		if p.root, err = f.profile(); err != nil {
			return nil, err
		}
	}
	for _, model := range slices.Sorted(maps.Keys(f.Models)) {
		section := f.Models[model]
		switch {
		case model == "":
			return nil, errors.New("models: a name is empty")
		case section == nil:
			return nil, fmt.Errorf("models: %s: has no profile", model)
		}
		if p.models[model], err = section.profile(); err != nil {
			return nil, fmt.Errorf("models: %s: %w", model, err)
		}
	}
	if f.WorkerSelection != nil {
		if err := f.WorkerSelection.check(); err != nil {
			return nil, fmt.Errorf("worker_selection: %w", err)
		}
	} else if p.root == nil && len(p.models) == 0 {
		return nil, errors.New("holds neither a profile nor worker_selection")
	}
	return p, nil
}

// empty tells whether none of the keys is there.
func (s *profileSection) empty() bool {
	return s.DefaultFamily == nil && s.Buckets == nil && s.Classes == nil
}

func (s *profileSection) profile() (*Profile, error) {
	switch {
	case s.DefaultFamily == nil:
		return nil, errors.New("default_policy_family: is missing")
	case !policyName.MatchString(*s.DefaultFamily):
		return nil, fmt.Errorf("default_policy_family: %w", badName(*s.DefaultFamily))
	case len(s.Buckets) == 0:
		return nil, errors.New("uncached_isl_buckets: there are none")
	case len(s.Classes) == 0:
		return nil, errors.New("policy_classes: there are none")
	}
	p := &Profile{explicit: map[string]int{}, families: map[string][]int{}, family: *s.DefaultFamily}
	for i := range s.Buckets {
		if err := p.addBucket(&s.Buckets[i]); err != nil {
			return nil, fmt.Errorf("uncached_isl_buckets: entry %d: %w", i+1, err)
		}
	}
	for i := range s.Classes {
		if err := p.addClass(&s.Classes[i]); err != nil {
			return nil, fmt.Errorf("policy_classes: entry %d: %w", i+1, err)
		}
	}
	return p, p.check()
}

func (p *Profile) addBucket(s *bucketSection) error {
	switch {
	case !policyName.MatchString(s.Bucket):
		return fmt.Errorf("bucket: %w", badName(s.Bucket))
	case slices.ContainsFunc(p.buckets, func(b bucket) bool { return b.name == s.Bucket }):
		return fmt.Errorf("bucket: there are two %s", s.Bucket)
	case s.MinTokens == nil:
		return errors.New("min_tokens: is missing")
	case len(p.buckets) == 0 && *s.MinTokens != 0:
		return errors.New("min_tokens: the first has to be 0")
	case len(p.buckets) > 0 && uint64(*s.MinTokens) <= p.buckets[len(p.buckets)-1].floor:
		return errors.New("min_tokens: is not above the one before")
	}
	p.buckets = append(p.buckets, bucket{uint64(*s.MinTokens), s.Bucket})
	return nil
}

func (p *Profile) addClass(s *classSection) error {
	c := Class{
		Name: s.Name, Order: FCFS,
		BusyPrefillTokens: (*uint64)(s.BusyPrefillTokens), BusyPrefillFrac: s.BusyPrefillFrac,
		MaxRequests: (*uint64)(s.MaxRequests), MaxISLTokens: (*uint64)(s.MaxISLTokens), MaxCachedTokens: (*uint64)(s.MaxCachedTokens),
	}
	if s.Order != "" {
		c.Order = QueueOrder(s.Order)
	}
	switch {
	case !policyName.MatchString(c.Name):
		return fmt.Errorf("name: %w", badName(c.Name))
	case slices.ContainsFunc(p.Classes, func(o Class) bool { return o.Name == c.Name }):
		return fmt.Errorf("name: there are two %s", c.Name)
	case c.Order != FCFS && c.Order != WSPT:
		return fmt.Errorf("queue_policy: %q is neither fcfs nor wspt", c.Order)
	case s.Quantum == nil || *s.Quantum == 0:
		return errors.New("quantum: needs to be above 0")
	case c.BusyPrefillFrac != nil && !(*c.BusyPrefillFrac >= 0 && *c.BusyPrefillFrac <= math.MaxFloat64):
		return fmt.Errorf("prefill_busy_threshold_frac: %v is not a number of at least 0", *c.BusyPrefillFrac)
	case (s.Family == nil) != (s.Bucket == nil):
		return errors.New("policy_family and cache_bucket: have to be both there or both not")
	}
	c.Quantum = uint64(*s.Quantum)
	p.Classes = append(p.Classes, c)
	if s.Family == nil {
		p.explicit[c.Name] = len(p.Classes) - 1
		return nil
	}
	if !policyName.MatchString(*s.Family) {
		return fmt.Errorf("policy_family: %w", badName(*s.Family))
	}
	return p.addToFamily(*s.Family, *s.Bucket)
}

// addToFamily makes the last class that of a family and a bucket.
func (p *Profile) addToFamily(family, name string) error {
	if p.families[family] == nil {
		p.families[family] = slices.Repeat([]int{noClass}, len(p.buckets))
	}
	b := slices.IndexFunc(p.buckets, func(b bucket) bool { return b.name == name })
	switch {
	case b < 0:
		return fmt.Errorf("cache_bucket: there is no bucket %q", name)
	case p.families[family][b] != noClass:
		return fmt.Errorf("cache_bucket: family %s has a class for %s already", family, name)
	}
	p.families[family][b] = len(p.Classes) - 1
	return nil
}

// noClass stands where a family has no class for a bucket yet.
const noClass = -1

// check finds what can only be told of all classes together.
func (p *Profile) check() error {
	for _, family := range slices.Sorted(maps.Keys(p.families)) {
		if b := slices.Index(p.families[family], noClass); b >= 0 {
			return fmt.Errorf("policy_classes: family %s has no class for bucket %s", family, p.buckets[b].name)
		}
		if _, ok := p.explicit[family]; ok {
			return fmt.Errorf("policy_classes: %s is the name of a family and of a class outside of families", family)
		}
	}
	if p.families[p.family] == nil {
		return fmt.Errorf("default_policy_family: no class is of family %s", p.family)
	}
	return nil
}

func (s *selectionSection) check() error {
	if len(s.Instances) > 0 { // there is no type of which one could be
		in := s.Instances[0]
		switch {
		case !policyName.MatchString(in.Name):
			return fmt.Errorf("instances: entry 1: name: %w", badName(in.Name))
		case in.Name == BuiltInSelection:
			return fmt.Errorf("instances: entry 1: name: %s is the built-in policy", in.Name)
		}
		return fmt.Errorf("instances: entry 1: type: %q is not known; the built-in policy, %s, is the only one", in.Type, BuiltInSelection)
	}
	for _, role := range []struct {
		key  string
		name *string
	}{{"aggregated", s.Aggregated}, {"prefill", s.Prefill}, {"decode", s.Decode}, {"encode", s.Encode}} {
		if role.name != nil && *role.name != BuiltInSelection {
			return fmt.Errorf("%s: there is no policy %q; the built-in one is %s", role.key, *role.name, BuiltInSelection)
		}
	}
	return nil
}

// badName is the fault of a name that policyName does not match.
func badName(name string) error {
	return fmt.Errorf("%q is not a name of letters, digits, _, . and -", name)
}
