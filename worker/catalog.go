package worker

import (
	"fmt"
	"maps"
	"slices"
	"sort"
)

// Catalog is one immutable picture of the registered workers and of the model names that
// clients may use. Changes make a new one. It is safe for concurrent use.
type Catalog struct {
	workers    []*Worker // by ID
	configured []string
	aliases    map[string]string       // operator's alias -> model
	names      map[string]string       // any name -> canonical model
	partitions map[Partition][]*Worker // by ID
	narrowed   map[servedName][]*Worker
	adapters   map[servedName]bool // the further names that may be adapters: false for those that all workers call aliases
	models     []string            // canonical, sorted
}

// servedName is a further name that some workers of a partition answer to.
type servedName struct {
	Partition
	name string
}

// NewCatalog returns a catalog with no workers. models are known even while no worker serves
// them; aliases map further names to models or to workers' own further names, and requests that
// use one are rewritten. It fails if a name would mean two things.
func NewCatalog(models []string, aliases map[string]string) (*Catalog, error) {
	for alias, name := range aliases {
		if _, ok := aliases[name]; ok {
			return nil, fmt.Errorf("alias %q: %q is an alias too", alias, name)
		}
	}
	return build(nil, slices.Clone(models), maps.Clone(aliases))
}

// With returns the catalog with w added, or put in place of the worker of the same ID. It
// fails if a model name would mean two things.
func (c *Catalog) With(w *Worker) (*Catalog, error) {
	if len(w.Models) == 0 {
		return nil, fmt.Errorf("worker %s: no model names", w.Name)
	}
	for _, o := range c.workers {
		if o.ID != w.ID && o.Name == w.Name {
			return nil, fmt.Errorf("worker %s: the name is taken by %s", w.Name, o.Endpoint)
		}
	}
	return build(append(c.others(w.ID), w), c.configured, c.aliases)
}

// Without returns the catalog with the worker of that ID left out. Its model stays known only
// if it is configured or another worker has it.
func (c *Catalog) Without(id ID) *Catalog {
	next, err := build(c.others(id), c.configured, c.aliases)
	if err != nil {
		panic("worker: a smaller catalog cannot become ambiguous: " + err.Error())
	}
	return next
}

func (c *Catalog) others(id ID) []*Worker {
	rest := make([]*Worker, 0, len(c.workers)+1)
	for _, w := range c.workers {
		if w.ID != id {
			rest = append(rest, w)
		}
	}
	return rest
}

func build(workers []*Worker, configured []string, aliases map[string]string) (*Catalog, error) {
	sort.Slice(workers, func(i, j int) bool { return workers[i].ID < workers[j].ID })
	c := &Catalog{
		workers: workers, configured: configured, aliases: aliases,
		names: map[string]string{}, partitions: map[Partition][]*Worker{}, narrowed: map[servedName][]*Worker{},
		adapters: map[servedName]bool{},
	}
	means := func(name, model string) error {
		if had, ok := c.names[name]; ok && had != model {
			return fmt.Errorf("model %q: means both %q and %q", name, had, model)
		}
		c.names[name] = model
		return nil
	}
	for _, m := range configured {
		if err := means(m, m); err != nil {
			return nil, err
		}
	}
	for _, w := range workers {
		c.partitions[w.Partition()] = append(c.partitions[w.Partition()], w)
		for i, m := range w.Models {
			if err := means(m, w.Models[0]); err != nil {
				return nil, err
			}
			if !slices.Contains(w.Models[:i], m) {
				key := servedName{w.Partition(), m}
				c.narrowed[key] = append(c.narrowed[key], w)
				c.adapters[key] = c.adapters[key] || i > 0 && !slices.Contains(w.Aliases, m)
			}
		}
	}
	for _, name := range aliases {
		if _, ok := c.names[name]; !ok { // nobody serves it yet
			c.names[name] = name
		}
	}
	for alias, name := range aliases {
		if err := means(alias, c.names[name]); err != nil {
			return nil, err
		}
	}
	seen := map[string]bool{}
	for _, m := range c.names {
		if !seen[m] {
			seen[m] = true
			c.models = append(c.models, m)
		}
	}
	sort.Strings(c.models)
	return c, nil
}

// Name is what a client's model name turned out to mean.
type Name struct {
	Partition Partition
	Served    string    // what to ask the worker for: differs from the client's word for an alias
	Workers   []*Worker // those of the partition that answer to Served, by ID; read-only
	Narrowed  bool      // Workers are not the whole partition
	Adapter   bool      // Served is an adapter of the model, or might be: not all Workers call it an alias
}

// Resolve finds the partition for a model name and a tenant: the tenant's own if workers are
// registered for it, else the default tenant's. It reports false for an unknown name.
func (c *Catalog) Resolve(model, tenant string) (Name, bool) {
	canonical, ok := c.names[model]
	if !ok {
		return Name{}, false
	}
	n := Name{Partition: Partition{canonical, tenant}, Served: model}
	if name, ok := c.aliases[model]; ok {
		n.Served = name
	}
	if n.Workers, ok = c.partitions[n.Partition]; !ok {
		n.Partition.Tenant = DefaultTenant
		n.Workers = c.partitions[n.Partition]
	}
	if n.Served != canonical {
		key := servedName{n.Partition, n.Served}
		n.Workers, n.Narrowed, n.Adapter = c.narrowed[key], true, c.adapters[key]
	}
	return n, true
}

// Canonical is the model that a name stands for, or false if the name is unknown.
func (c *Catalog) Canonical(name string) (string, bool) {
	m, ok := c.names[name]
	return m, ok
}

// Models are the canonical model names, sorted; read-only.
func (c *Catalog) Models() []string { return c.models }

// Names are all names that clients may use, canonical ones included, sorted.
func (c *Catalog) Names() []string { return slices.Sorted(maps.Keys(c.names)) }

// Workers are all registered workers by ID; read-only.
func (c *Catalog) Workers() []*Worker { return c.workers }

// In are the workers of a partition by ID; read-only.
func (c *Catalog) In(p Partition) []*Worker { return c.partitions[p] }

// Find returns the worker with that ID, or nil.
func (c *Catalog) Find(id ID) *Worker {
	i := sort.Search(len(c.workers), func(i int) bool { return c.workers[i].ID >= id })
	if i < len(c.workers) && c.workers[i].ID == id {
		return c.workers[i]
	}
	return nil
}

// IsAlias tells whether a name is an operator's alias, which workers need not know.
func (c *Catalog) IsAlias(name string) bool { _, ok := c.aliases[name]; return ok }
