package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// dashboard is what the tests read of deploy/grafana/spillway.json.
type dashboard struct {
	Templating struct {
		List []struct {
			Name  string
			Type  string
			Query any
		}
	}
	Panels []panel
}

// panel is one panel of the dashboard; one of type row is only a heading.
type panel struct {
	ID          int
	Type        string
	Title       string
	Description string
	GridPos     struct{ X, Y, W, H int }
	Datasource  struct{ UID string }
	FieldConfig struct{ Defaults struct{ Unit string } }
	Targets     []struct {
		RefID        string
		Expr         string
		LegendFormat string
	}
}

func readDashboard(t *testing.T) dashboard {
	t.Helper()
	text, err := os.ReadFile("../../deploy/grafana/spillway.json")
	if err != nil {
		t.Fatal(err)
	}
	var d dashboard
	if err := json.Unmarshal(text, &d); err != nil {
		t.Fatalf("spillway.json: %v", err)
	}
	if len(d.Panels) < 10 {
		t.Fatalf("spillway.json: only %d panels", len(d.Panels))
	}
	return d
}

// query is an expression of the dashboard, with values for Grafana's variables.
type query struct{ from, expr string }

// queries are all expressions of the dashboard, for all models. rate stands for what Grafana
// takes rates over, rng for the time that it shows.
func (d dashboard) queries(rate, rng string) []query {
	vars := strings.NewReplacer("$__rate_interval", rate, "$__range", rng, "$model", ".*")
	var all []query
	for _, p := range d.Panels {
		for _, target := range p.Targets {
			all = append(all, query{p.Title + " " + target.RefID, vars.Replace(target.Expr)})
		}
	}
	return all
}

// TestDashboard checks that every panel can be read: what it shows, in which unit, and of whom.
func TestDashboard(t *testing.T) {
	d := readDashboard(t)
	var vars []string
	for _, v := range d.Templating.List {
		vars = append(vars, fmt.Sprintf("%s %s %v", v.Name, v.Type, v.Query))
	}
	const models = "map[query:label_values(dynamo_frontend_requests_started_total, model) refId:model]"
	if want := []string{"datasource datasource prometheus", "model query " + models}; !slices.Equal(vars, want) {
		t.Errorf("variables %q, want %q", vars, want)
	}
	ids, titles, taken := map[int]bool{}, map[string]bool{}, map[[2]int]string{}
	for _, p := range d.Panels {
		if ids[p.ID] || titles[p.Title] || p.Title == "" {
			t.Errorf("panel %d %q: ID or title is there twice, or missing", p.ID, p.Title)
		}
		ids[p.ID], titles[p.Title] = true, true
		for x := p.GridPos.X; x < p.GridPos.X+p.GridPos.W; x++ {
			for y := p.GridPos.Y; y < p.GridPos.Y+p.GridPos.H; y++ {
				if other := taken[[2]int{x, y}]; other != "" || x >= 24 {
					t.Fatalf("%q covers %q or leaves the page at x=%d, y=%d", p.Title, other, x, y)
				}
				taken[[2]int{x, y}] = p.Title
			}
		}
		if p.Type == "row" {
			continue
		}
		if p.Description == "" || p.FieldConfig.Defaults.Unit == "" || p.Datasource.UID != "${datasource}" || len(p.Targets) == 0 {
			t.Errorf("%q: description %q, unit %q, data source %q, %d targets; want all of them",
				p.Title, p.Description, p.FieldConfig.Defaults.Unit, p.Datasource.UID, len(p.Targets))
		}
		for _, target := range p.Targets {
			// A label that is called by the legend and aggregated away would be shown as nothing.
			for _, m := range regexp.MustCompile(`{{(\w+)}}`).FindAllStringSubmatch(target.LegendFormat, -1) {
				if !regexp.MustCompile(`by \([^)]*\b` + m[1] + `\b[^)]*\)`).MatchString(target.Expr) {
					t.Errorf("%q: the legend %q shows %s, which %s does not keep", p.Title, target.LegendFormat, m[1], target.Expr)
				}
			}
		}
	}
}

// TestDashboardExpressions has promtool parse every expression of the dashboard.
func TestDashboardExpressions(t *testing.T) {
	promtool := tool(t, "promtool")
	var rules strings.Builder
	rules.WriteString("groups: [{name: dashboard, rules: [")
	for i, q := range readDashboard(t).queries("1m", "30m") {
		fmt.Fprintf(&rules, "{record: 'panel:query%d', expr: %q},\n", i, q.expr)
	}
	rules.WriteString("]}]")
	file := filepath.Join(t.TempDir(), "dashboard.yml")
	if err := os.WriteFile(file, []byte(rules.String()), 0o600); err != nil {
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), promtool, "check", "rules", file).CombinedOutput(); err != nil {
		t.Errorf("promtool check rules: %v\n%s", err, out)
	}
}
