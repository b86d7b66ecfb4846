package worker_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"spillway/worker"
)

func serving(id worker.ID, tenant string, models ...string) *worker.Worker {
	if tenant == "" {
		tenant = worker.DefaultTenant
	}
	return &worker.Worker{ID: id, Name: fmt.Sprintf("w%d", id), Endpoint: fmt.Sprintf("http://w%d", id), Tenant: tenant, Models: models}
}

func catalog(t *testing.T, models []string, aliases map[string]string, workers ...*worker.Worker) *worker.Catalog {
	t.Helper()
	c, err := worker.NewCatalog(models, aliases)
	if err != nil {
		t.Fatalf("NewCatalog(%v, %v) = %v", models, aliases, err)
	}
	for _, w := range workers {
		if c, err = c.With(w); err != nil {
			t.Fatalf("With(%+v) = %v", w, err)
		}
	}
	return c
}

// named is serving with names of which some are aliases.
func named(id worker.ID, aliases string, models ...string) *worker.Worker {
	w := serving(id, "", models...)
	w.Aliases = strings.Fields(aliases)
	return w
}

func TestResolve(t *testing.T) {
	c := catalog(t, []string{"later"}, map[string]string{"gpt": "base", "best": "base-lora", "soon": "later", "ghost": "nowhere", "best-second": "second"},
		named(7, "second third", "twice", "second", "third"), named(8, "second", "twice", "second", "third"), serving(2, "", "base", "base-lora"), serving(1, "", "base"), serving(3, "", "base", "base-lora", "base-sql"),
		serving(4, "acme", "base", "base-sql"), serving(5, "acme", "own"), serving(6, "", "other"))
	for _, tt := range []struct {
		model, tenant string
		unknown       bool
		want          worker.Name // Workers left out
		workers       []worker.ID
	}{
		{model: "base", want: worker.Name{Partition: worker.Partition{Model: "base", Tenant: "default"}, Served: "base"}, workers: []worker.ID{1, 2, 3}},
		{model: "gpt", want: worker.Name{Partition: worker.Partition{Model: "base", Tenant: "default"}, Served: "base"}, workers: []worker.ID{1, 2, 3}},
		{model: "base-lora", want: worker.Name{Partition: worker.Partition{Model: "base", Tenant: "default"}, Served: "base-lora", Narrowed: true, Adapter: true}, workers: []worker.ID{2, 3}},
		{model: "best", want: worker.Name{Partition: worker.Partition{Model: "base", Tenant: "default"}, Served: "base-lora", Narrowed: true, Adapter: true}, workers: []worker.ID{2, 3}},
		{model: "base-sql", want: worker.Name{Partition: worker.Partition{Model: "base", Tenant: "default"}, Served: "base-sql", Narrowed: true, Adapter: true}, workers: []worker.ID{3}},
		{model: "base", tenant: "acme", want: worker.Name{Partition: worker.Partition{Model: "base", Tenant: "acme"}, Served: "base"}, workers: []worker.ID{4}},
		{model: "base-sql", tenant: "acme", want: worker.Name{Partition: worker.Partition{Model: "base", Tenant: "acme"}, Served: "base-sql", Narrowed: true, Adapter: true}, workers: []worker.ID{4}},
		{model: "base-lora", tenant: "acme", want: worker.Name{Partition: worker.Partition{Model: "base", Tenant: "acme"}, Served: "base-lora", Narrowed: true}},
		{model: "base", tenant: "nobody", want: worker.Name{Partition: worker.Partition{Model: "base", Tenant: "default"}, Served: "base"}, workers: []worker.ID{1, 2, 3}},
		{model: "second", want: worker.Name{Partition: worker.Partition{Model: "twice", Tenant: "default"}, Served: "second", Narrowed: true}, workers: []worker.ID{7, 8}},
		{model: "best-second", want: worker.Name{Partition: worker.Partition{Model: "twice", Tenant: "default"}, Served: "second", Narrowed: true}, workers: []worker.ID{7, 8}},
		{model: "third", want: worker.Name{Partition: worker.Partition{Model: "twice", Tenant: "default"}, Served: "third", Narrowed: true, Adapter: true}, workers: []worker.ID{7, 8}},
		{model: "own", want: worker.Name{Partition: worker.Partition{Model: "own", Tenant: "default"}, Served: "own"}},
		{model: "own", tenant: "acme", want: worker.Name{Partition: worker.Partition{Model: "own", Tenant: "acme"}, Served: "own"}, workers: []worker.ID{5}},
		{model: "later", want: worker.Name{Partition: worker.Partition{Model: "later", Tenant: "default"}, Served: "later"}},
		{model: "soon", want: worker.Name{Partition: worker.Partition{Model: "later", Tenant: "default"}, Served: "later"}},
		{model: "ghost", want: worker.Name{Partition: worker.Partition{Model: "nowhere", Tenant: "default"}, Served: "nowhere"}},
		{model: "Base", unknown: true},
		{model: "", unknown: true},
		{model: "w1", unknown: true},
	} {
		got, ok := c.Resolve(tt.model, tt.tenant)
		var workers []worker.ID
		for _, w := range got.Workers {
			workers = append(workers, w.ID)
		}
		got.Workers = nil
		if ok == tt.unknown || fmt.Sprint(got) != fmt.Sprint(tt.want) || !slices.Equal(workers, tt.workers) {
			t.Errorf("Resolve(%q, %q) = %+v, %v, %v, want %+v, %v", tt.model, tt.tenant, got, workers, ok, tt.want, tt.workers)
		}
		if model, known := c.Canonical(tt.model); known == tt.unknown || model != tt.want.Partition.Model {
			t.Errorf("Canonical(%q) = %q, %v, want %q", tt.model, model, known, tt.want.Partition.Model)
		}
	}
	if got, want := c.Models(), []string{"base", "later", "nowhere", "other", "own", "twice"}; !slices.Equal(got, want) {
		t.Errorf("Models() = %v, want %v", got, want)
	}
	want := []string{"base", "base-lora", "base-sql", "best", "best-second", "ghost", "gpt", "later", "nowhere", "other", "own", "second", "soon", "third", "twice"}
	if got := c.Names(); !slices.Equal(got, want) {
		t.Errorf("Names() = %v, want %v", got, want)
	}
}

func TestResolveAllocatesNothing(t *testing.T) {
	c := catalog(t, nil, map[string]string{"gpt": "base-lora"}, serving(1, "", "base", "base-lora"), serving(2, "", "base"))
	for _, name := range []string{"base", "base-lora", "gpt", "unknown"} {
		if n := testing.AllocsPerRun(100, func() { c.Resolve(name, "tenant") }); n != 0 {
			t.Errorf("Resolve(%s) allocates %v times, want 0", name, n)
		}
	}
}

// TestAmbiguous: a name that would mean two things is refused, and the catalog stays as it was.
func TestAmbiguous(t *testing.T) {
	c := catalog(t, []string{"configured"}, map[string]string{"gpt": "a"}, serving(1, "", "a", "x"), serving(2, "", "b"))
	for _, tt := range []struct {
		name string
		w    *worker.Worker
		want string
	}{
		{"an adapter of two models", serving(3, "", "b", "x"), `"x"`},
		{"an adapter that is a model", serving(3, "", "b", "a"), `"a"`},
		{"a model that is an adapter", serving(3, "", "x"), `"x"`},
		{"also in another tenant", serving(3, "acme", "x"), `"x"`},
		{"an adapter that is configured as a model", serving(3, "", "b", "configured"), `"configured"`},
		{"a model that is an alias", serving(3, "", "gpt"), `"gpt"`},
		{"no names", serving(3, ""), "no model names"},
		{"the name of another worker", &worker.Worker{ID: 3, Name: "w1", Models: []string{"a"}}, "w1"},
	} {
		if _, err := c.With(tt.w); err == nil || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: With(%v) = %v, want an error about %s", tt.name, tt.w.Models, err, tt.want)
		}
	}
	for _, tt := range []struct {
		name string
		w    *worker.Worker
	}{
		{"the same model elsewhere", serving(3, "acme", "a")},
		{"the adapter elsewhere", serving(3, "acme", "a", "x")},
		{"a name twice", serving(3, "", "a", "x", "x", "a")},
		{"an alias that it knows itself", serving(3, "", "a", "gpt")},
		{"a configured model", serving(3, "", "configured")},
		{"in place of its former record", serving(2, "", "c")},
	} {
		if next, err := c.With(tt.w); err != nil {
			t.Errorf("%s: With(%v) = %v, want nil", tt.name, tt.w.Models, err)
		} else if got, _ := next.Resolve("x", ""); len(got.Workers) < 1 || !slices.IsSortedFunc(got.Workers, func(a, b *worker.Worker) int { return int(a.ID) - int(b.ID) }) {
			t.Errorf("%s: Resolve(x) = %+v, want its workers by ID", tt.name, got)
		}
	}
	for _, aliases := range []map[string]string{{"a": "b", "b": "c"}, {"a": "a"}} {
		if _, err := worker.NewCatalog(nil, aliases); err == nil {
			t.Errorf("NewCatalog(aliases %v) = nil, want an error", aliases)
		}
	}
	if _, err := worker.NewCatalog([]string{"a", "b"}, map[string]string{"a": "b"}); err == nil {
		t.Error("NewCatalog with an alias that is a model = nil, want an error")
	}
	if got := len(c.Workers()); got != 2 {
		t.Errorf("workers = %d, want 2 as before", got)
	}
}

// TestComeAndGo: a catalog never changes; the next one has more or less.
func TestComeAndGo(t *testing.T) {
	empty := catalog(t, []string{"kept"}, nil)
	one := catalog(t, []string{"kept"}, nil, serving(1, "", "kept", "kept-lora"))
	two, err := one.With(serving(2, "", "gone"))
	if err != nil {
		t.Fatal(err)
	}
	moved, err := two.With(serving(1, "", "gone"))
	if err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name    string
		c       *worker.Catalog
		models  []string
		workers []worker.ID
	}{
		{"empty", empty, []string{"kept"}, nil},
		{"one", one, []string{"kept"}, []worker.ID{1}},
		{"two", two, []string{"gone", "kept"}, []worker.ID{1, 2}},
		{"moved", moved, []string{"gone", "kept"}, []worker.ID{1, 2}},
		{"without the second", two.Without(2), []string{"kept"}, []worker.ID{1}},
		{"without the first", two.Without(1), []string{"gone", "kept"}, []worker.ID{2}},
		{"without a stranger", two.Without(9), []string{"gone", "kept"}, []worker.ID{1, 2}},
	} {
		var workers []worker.ID
		for _, w := range tt.c.Workers() {
			workers = append(workers, w.ID)
			if tt.c.Find(w.ID) != w {
				t.Errorf("%s: Find(%v) is another record", tt.name, w.ID)
			}
		}
		if !slices.Equal(tt.c.Models(), tt.models) || !slices.Equal(workers, tt.workers) || tt.c.Find(9) != nil {
			t.Errorf("%s: models %v, workers %v, want %v, %v", tt.name, tt.c.Models(), workers, tt.models, tt.workers)
		}
	}
	if _, ok := moved.Resolve("kept-lora", ""); ok {
		t.Error("an adapter whose worker has another model now is still known")
	}
	if !catalog(t, nil, map[string]string{"a": "b"}).IsAlias("a") || one.IsAlias("kept") {
		t.Error("IsAlias(alias) = false, or of a model = true")
	}
}
