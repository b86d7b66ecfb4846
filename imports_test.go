package spillway_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"io/fs"
	"maps"
	"path"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
)

const module = "spillway"

// layer is a floor of the house; imports never lead from a lower one to a higher one.
type layer int

const (
	leaf layer = iota
	core
	shell
	top
)

// room is one package of the list in ARCHITECTURE.md: its floor, and what of this module it
// may import, which includes what those may import.
type room struct {
	layer   layer
	imports []string
}

// rooms lists all packages, planned ones included.
var rooms = map[string]room{
	"":             {top, nil},
	"cmd/spillway": {top, []string{"buckets", "logline", "configs", "proxy", "selectservice", "tracker/service", "kvindex/service", "dispatch", "monitor", "replica", "tokenize", "sim", "replay"}},
	"configs":      {top, []string{"proxy", "selectservice", "tracker/service", "kvindex/service", "dispatch", "monitor", "replica", "tokenize", "sim", "replay"}},

	"proxy":           {shell, []string{"httperr", "buckets", "upstream", "sockio"}},
	"selectservice":   {shell, []string{"httperr", "jsonhttp"}},
	"tracker/service": {shell, []string{"httperr", "jsonhttp"}},
	"kvindex/service": {shell, []string{"jsonhttp", "wire", "kvindex"}},
	"dispatch":        {shell, []string{"dispatch/budget", "upstream"}},
	"monitor":         {shell, []string{"wire", "busy", "tracker", "kvindex", "buckets"}},
	"replica":         {shell, []string{"wire", "tracker"}},
	"tokenize":        {shell, []string{"buckets", "upstream"}},
	"httperr":         {shell, []string{"router"}},
	"jsonhttp":        {shell, []string{"httperr"}},
	"upstream":        {shell, []string{"sockio"}},
	"sockio":          {shell, nil},
	"logline":         {shell, nil},
	"sim":             {shell, []string{"wire", "sim/engine"}},
	"replay":          {shell, []string{"wire"}},

	"router":          {core, []string{"busy", "tracker", "kvindex"}},
	"busy":            {core, []string{"worker"}},
	"tracker":         {core, []string{"worker", "kvhash"}},
	"kvindex":         {core, []string{"worker", "kvhash"}},
	"dispatch/budget": {core, nil},
	"sim/engine":      {core, nil},

	"worker":  {leaf, nil},
	"kvhash":  {leaf, nil},
	"buckets": {leaf, nil},
	"wire":    {leaf, []string{"worker", "kvhash"}},
}

// private packages are part of another one, which alone may import them, with its other parts; tests
// may import sim/engine too, to drive it in virtual time.
var private = map[string][]string{"sim/engine": {"sim"}, "configs": {"cmd/spillway"}}

// partOf tells whether a package is one of the others or part of one.
func partOf(pkg string, owners []string) bool {
	return slices.ContainsFunc(owners, func(owner string) bool { return pkg == owner || strings.HasPrefix(pkg, owner+"/") })
}

// allowed is what a package may import of this module.
func allowed(pkg string) map[string]bool {
	all := map[string]bool{}
	var add func(from string)
	add = func(from string) {
		for _, to := range rooms[from].imports {
			if owners, ok := private[to]; (!ok || partOf(pkg, owners)) && !all[to] {
				all[to] = true
				add(to)
			}
		}
	}
	add(pkg)
	return all
}

// allowedInTest tells whether a test of pkg may import to: itself, what pkg may import,
// anything on a lower floor, from proxy the simulated workers, and from cmd everything.
func allowedInTest(pkg, to string) bool {
	if pkg == to || pkg == "cmd/spillway" || to == "sim/engine" || pkg == "proxy" && to == "sim" || allowed(pkg)[to] {
		return true
	}
	_, owned := private[to]
	return !owned && rooms[to].layer < rooms[pkg].layer
}

// source is one parsed Go file of the module.
type source struct {
	pkg  string // its directory, "" for the root
	name string
	test bool
	file *ast.File
}

func sources(t *testing.T) []source {
	t.Helper()
	var all []source
	err := filepath.WalkDir(".", func(p string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if d.IsDir() {
			if name := d.Name(); p != "." && (name == "testdata" || strings.HasPrefix(name, ".") || strings.HasPrefix(name, "_")) {
				return filepath.SkipDir
			}
			return nil
		}
		if path.Ext(p) != ".go" {
			return nil
		}
		f, err := parser.ParseFile(token.NewFileSet(), p, nil, parser.SkipObjectResolution)
		if err != nil {
			return err
		}
		pkg := filepath.ToSlash(filepath.Dir(p))
		if pkg == "." {
			pkg = ""
		}
		all = append(all, source{pkg: pkg, name: p, test: strings.HasSuffix(p, "_test.go"), file: f})
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// inModule lists the packages of this module that a file imports.
func inModule(f *ast.File) []string {
	var all []string
	for _, spec := range f.Imports {
		p, _ := strconv.Unquote(spec.Path.Value) // the parser has unquoted it before
		if p == module {
			all = append(all, "")
		} else if in, ok := strings.CutPrefix(p, module+"/"); ok {
			all = append(all, in)
		}
	}
	return all
}

func TestImports(t *testing.T) {
	files := sources(t)
	if len(files) < 10 {
		t.Fatalf("only %d Go files found", len(files))
	}
	for _, f := range files {
		if _, ok := rooms[f.pkg]; !ok {
			t.Errorf("%s: package %s is not in the list of packages", f.name, f.pkg)
			continue
		}
		for _, to := range inModule(f.file) {
			if f.test && !allowedInTest(f.pkg, to) || !f.test && !allowed(f.pkg)[to] {
				t.Errorf("%s: %s may not import %s", f.name, f.pkg, to)
			}
		}
	}
}

// shared are the shell packages that others of the shell may import. They know none of those that use them.
var shared = []string{"httperr", "jsonhttp", "upstream", "sockio"}

// TestRooms checks the list itself: imports lead down, or stay among shells only for those that are
// shared and a shell's own parts.
func TestRooms(t *testing.T) {
	for _, pkg := range slices.Sorted(maps.Keys(rooms)) {
		for to := range allowed(pkg) {
			r, ok := rooms[to]
			switch {
			case !ok:
				t.Errorf("%s: imports %s, which is not in the list", pkg, to)
			case r.layer > rooms[pkg].layer:
				t.Errorf("%s: imports %s, which is above it", pkg, to)
			case r.layer == shell && rooms[pkg].layer == shell && !slices.Contains(shared, to) && !partOf(pkg, private[to]):
				t.Errorf("%s: imports the shell package %s", pkg, to)
			}
		}
	}
}

func TestAllowed(t *testing.T) {
	for _, tt := range []struct {
		pkg, to    string
		want, test bool
	}{
		{"proxy", "router", true, true}, // through httperr
		{"proxy", "upstream", true, true},
		{"proxy", "monitor", false, false},
		{"proxy", "sim", false, true}, // real workers over real sockets
		{"router", "sim", false, false},
		{"router", "worker", true, true},
		{"router", "sim/engine", false, true},
		{"router", "proxy", false, false},
		{"busy", "tracker", false, false},
		{"busy", "kvhash", false, true}, // a leaf is below
		{"worker", "busy", false, false},
		{"replay", "sim", false, false},
		{"monitor", "upstream", false, false},
		{"tokenize", "upstream", true, true},
		{"tokenize", "sockio", true, true},
		{"tokenize", "proxy", false, false},
		{"upstream", "sockio", true, true},
		{"monitor", "sockio", false, false},
		{"proxy", "configs", false, false},
		{"cmd/spillway", "configs", true, true},
		{"cmd/spillway", "upstream", true, true},
	} {
		if got := allowed(tt.pkg)[tt.to]; got != tt.want {
			t.Errorf("allowed(%s)[%s] = %v, want %v", tt.pkg, tt.to, got, tt.want)
		}
		if got := allowedInTest(tt.pkg, tt.to); got != tt.test {
			t.Errorf("allowedInTest(%s, %s) = %v, want %v", tt.pkg, tt.to, got, tt.test)
		}
	}
}
