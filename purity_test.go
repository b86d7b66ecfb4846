package spillway_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"reflect"
	"slices"
	"strconv"
	"strings"
	"testing"
)

// impureImports are packages that core and leaf packages must not import, with all below them.
var impureImports = []string{
	"net", "os", "io/fs", "io/ioutil", "log", "context", "syscall", "unsafe", "crypto/rand", "golang.org/x/sys",
	"github.com/prometheus", "github.com/labstack", "github.com/spf13", "github.com/knadh",
}

// pureImports are exceptions: they only calculate.
var pureImports = []string{"net/url", "net/netip"}

// clock and dice are the functions of packages time and math/rand that read the clock, start a
// timer, or draw from the process's own source of chance.
var (
	clock = []string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "Tick", "NewTicker", "NewTimer"}
	dice  = []string{"New", "NewPCG", "NewChaCha8", "NewZipf", "NewSource", "Rand", "PCG", "ChaCha8", "Zipf", "Source"} // these are fine
)

// impurities lists what a file does that only shell packages may do.
func impurities(f *ast.File) []string {
	var found []string
	names := map[string]string{} // local name -> import path
	for _, spec := range f.Imports {
		p, _ := strconv.Unquote(spec.Path.Value)
		local := p[strings.LastIndex(p, "/")+1:]
		if strings.HasPrefix(p, "math/rand") {
			local = "rand"
		}
		if spec.Name != nil {
			local = spec.Name.Name
		}
		names[local] = p
		impure := slices.ContainsFunc(impureImports, func(bad string) bool { return p == bad || strings.HasPrefix(p, bad+"/") })
		if impure && !slices.Contains(pureImports, p) || local == "." {
			found = append(found, "imports "+p)
		}
	}
	ast.Inspect(f, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			found = append(found, "starts a goroutine")
		case *ast.SelectorExpr:
			if n.Sel.Name == "Go" {
				found = append(found, "starts a goroutine by Go")
			}
			x, ok := n.X.(*ast.Ident)
			if !ok {
				break
			}
			from := names[x.Name]
			if from == "time" && slices.Contains(clock, n.Sel.Name) ||
				strings.HasPrefix(from, "math/rand") && !slices.Contains(dice, n.Sel.Name) {
				found = append(found, fmt.Sprintf("uses %s.%s", from, n.Sel.Name))
			}
		}
		return true
	})
	return found
}

func TestCoreIsPure(t *testing.T) {
	checked := 0
	for _, f := range sources(t) {
		if r, ok := rooms[f.pkg]; !ok || f.test || r.layer > core {
			continue
		}
		checked++
		for _, what := range impurities(f.file) {
			t.Errorf("%s: %s, and %s is pure", f.name, what, f.pkg)
		}
	}
	if checked == 0 {
		t.Error("no file of a core or leaf package found")
	}
}

func TestImpurities(t *testing.T) {
	for _, tt := range []struct {
		src  string
		want []string
	}{
		{`import "net/url"; import "sync"; var mu sync.Mutex; var u url.URL`, nil},
		{`import "net/http"`, []string{"imports net/http"}},
		{`import l "log/slog"`, []string{"imports log/slog"}},
		{`import "github.com/prometheus/client_golang/prometheus"`, []string{"imports github.com/prometheus/client_golang/prometheus"}},
		{`import . "fmt"`, []string{"imports fmt"}},
		{`import "time"; var d = time.Second; func f(now time.Time) time.Duration { return now.Sub(now) }`, nil},
		{`import "time"; var t = time.Now()`, []string{"uses time.Now"}},
		{`import clk "time"; var now = clk.Now`, []string{"uses time.Now"}},
		{`import "time"; func f() { <-time.After(1) }`, []string{"uses time.After"}},
		{`import "math/rand/v2"; func f(r *rand.Rand) int { return r.IntN(3) }`, nil},
		{`import "math/rand/v2"; var n = rand.IntN(3)`, []string{"uses math/rand/v2.IntN"}},
		{`func f() { go f() }`, []string{"starts a goroutine"}},
		{`import "sync"; func f(wg *sync.WaitGroup) { wg.Go(func() {}) }`, []string{"starts a goroutine by Go"}},
	} {
		f, err := parser.ParseFile(token.NewFileSet(), "x.go", "package x\n"+tt.src, parser.SkipObjectResolution)
		if err != nil {
			t.Fatalf("%s: %v", tt.src, err)
		}
		if got := impurities(f); !reflect.DeepEqual(got, tt.want) {
			t.Errorf("impurities(%s) = %q, want %q", tt.src, got, tt.want)
		}
	}
}
