package buckets_test

import (
	"slices"
	"strings"
	"testing"

	"spillway/buckets"
)

func TestOf(t *testing.T) {
	def := []float64{0, 2, 4, 8}
	const v = "SPILLWAY_HISTOGRAM_REQUEST_DURATION_SECONDS_"
	for _, tt := range []struct {
		name    string
		environ []string
		want    []float64
		warns   int
	}{
		{"nothing", []string{"HOME=/", "SPILLWAY_PORT=1"}, def, 0},
		{"a decade", []string{v + "MIN=1", v + "MAX=100", v + "COUNT=5"}, []float64{0, 3.2, 10, 32, 100}, 0}, // MIN is no bound
		{"the documented TTFT", []string{v + "MIN=0.001", v + "MAX=480", v + "COUNT=18"},
			[]float64{0, .0022, .0047, .01, .022, .047, .1, .22, .47, 1, 2.2, 4.7, 10, 22, 48, 100, 220, 480}, 0},
		{"one bound", []string{v + "MIN=1", v + "MAX=2", v + "COUNT=1"}, []float64{0}, 0},
		{"duplicates go", []string{v + "MIN=1", v + "MAX=1.2", v + "COUNT=9"}, []float64{0, 1, 1.1, 1.2}, 0},
		{"a part", []string{v + "MAX=16"}, []float64{0, 4, 8, 16}, 0}, // 2, 4, 8, 16 without the 2
		{"MIN 0", []string{v + "MIN=0"}, def, 1},
		{"MIN above MAX", []string{v + "MIN=9"}, def, 1},
		{"NaN", []string{v + "MIN=NaN"}, def, 1},
		{"Inf", []string{v + "MAX=Inf"}, def, 1},
		{"no number", []string{v + "MAX=ten"}, def, 1},
		{"no bounds", []string{v + "COUNT=0"}, def, 1},
		{"too many", []string{v + "COUNT=513"}, def, 1},
		{"another name", []string{"SPILLWAY_HISTOGRAM_REQUEST_DURATION_MAX=1"}, def, 1},
		{"another end", []string{v + "AVERAGE=1"}, def, 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			s := buckets.FromEnviron(tt.environ)
			if got := s.Of("request_duration_seconds", def); !slices.Equal(got, tt.want) {
				t.Errorf("Of with %s = %v, want %v", tt.environ, got, tt.want)
			}
			if got := s.Warnings(); len(got) != tt.warns {
				t.Errorf("Warnings with %s = %q, want %d", tt.environ, got, tt.warns)
			}
		})
	}
	var none *buckets.Shapes
	if got := none.Of("x", def); !slices.Equal(got, def) || none.Warnings() != nil {
		t.Errorf("a nil Shapes = %v, %v; want the default and no warning", got, none.Warnings())
	}
}

// TestMost has the largest shape keep its promise: ascending bounds up to MAX.
func TestMost(t *testing.T) {
	environ := strings.Fields("SPILLWAY_HISTOGRAM_X_MIN=1e-9 SPILLWAY_HISTOGRAM_X_MAX=1e9 SPILLWAY_HISTOGRAM_X_COUNT=512")
	got := buckets.FromEnviron(environ).Of("x", []float64{1})
	if !slices.IsSorted(got) || len(slices.Compact(slices.Clone(got))) != len(got) || got[len(got)-1] != 1e9 || len(got) > 512 {
		t.Errorf("bounds %v: want at most 512, ascending, up to 1e9", got)
	}
}
