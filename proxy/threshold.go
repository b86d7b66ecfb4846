package proxy

import (
	"encoding/json"
	"log/slog"
	"math"
	"net/http"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"

	"spillway/busy"
)

// maxThresholdBody bounds the body of POST /busy_threshold in bytes.
const maxThresholdBody = 64 << 10

// The names of the thresholds in JSON.
const (
	decodeField  = "active_decode_blocks_threshold"
	prefillField = "active_prefill_tokens_threshold"
	fracField    = "active_prefill_tokens_threshold_frac"
)

// thresholdsBody shows thresholds. The third appears only when it is set, so that the documented
// body is reproduced byte for byte when it is not.
type thresholdsBody struct {
	Decode  *float64 `json:"active_decode_blocks_threshold"`
	Prefill *uint64  `json:"active_prefill_tokens_threshold"`
	Frac    *float64 `json:"active_prefill_tokens_threshold_frac,omitempty"`
}

func newThresholdsBody(t busy.Thresholds) thresholdsBody {
	return thresholdsBody{t.DecodeFrac, t.PrefillTokens, t.PrefillFrac}
}

// LogValue shows the values and not where they lie.
func (b thresholdsBody) LogValue() slog.Value {
	return slog.GroupValue(setting(decodeField, b.Decode), setting(prefillField, b.Prefill), setting(fracField, b.Frac))
}

func setting[T any](name string, v *T) slog.Attr {
	if v == nil {
		return slog.String(name, "unset")
	}
	return slog.Any(name, *v)
}

type modelThresholds struct {
	Model string `json:"model"`
	thresholdsBody
}

func (s *Server) showThresholds(c echo.Context) error {
	list := struct {
		Thresholds []modelThresholds `json:"thresholds"`
	}{[]modelThresholds{}}
	names := s.router.Catalog().Models()
	if only := c.QueryParam("model"); only != "" {
		names = nil
		if model, ok := s.router.Catalog().Canonical(only); ok {
			names = []string{model}
		}
	}
	for _, name := range names {
		if model, t, ok := s.router.Thresholds(name); ok {
			list.Thresholds = append(list.Thresholds, modelThresholds{model, newThresholdsBody(t)})
		}
	}
	return c.JSON(http.StatusOK, list)
}

// setThresholds merges the given thresholds into a model's, or shows them if none is given.
func (s *Server) setThresholds(c echo.Context) error {
	raw, bad := s.readSmall(c, maxThresholdBody, "the body exceeds 64 KiB")
	if bad != nil {
		return refuse(c, bad)
	}
	name, t, bad := readThresholds(raw)
	if bad != nil {
		return refuse(c, bad)
	}
	if !t.Any() {
		model, now, ok := s.router.Thresholds(name)
		if !ok {
			model = name
		}
		return c.JSON(http.StatusOK, modelThresholds{model, newThresholdsBody(now)})
	}
	return s.changeThresholds(c, name, func(old busy.Thresholds) busy.Thresholds { return old.Merge(t) })
}

func (s *Server) clearThresholds(c echo.Context) error {
	name, field := c.QueryParam("model"), c.QueryParam("field")
	if name == "" {
		return refuse(c, &adminError{http.StatusBadRequest, "model: the query parameter is missing"})
	}
	switch field {
	case "", decodeField, prefillField, fracField:
	default:
		return refuse(c, &adminError{http.StatusBadRequest, "field: " + strconv.Quote(field) + " is no threshold"})
	}
	return s.changeThresholds(c, name, func(t busy.Thresholds) busy.Thresholds {
		switch field {
		case decodeField:
			t.DecodeFrac = nil
		case prefillField:
			t.PrefillTokens = nil
		case fracField:
			t.PrefillFrac = nil
		default:
			t = busy.Thresholds{}
		}
		return t
	})
}

// changeThresholds answers after every worker of the model has been judged anew.
func (s *Server) changeThresholds(c echo.Context, name string, change func(busy.Thresholds) busy.Thresholds) error {
	model, old, t, ok := s.router.SetThresholds(name, change, time.Now())
	if !ok {
		return refuse(c, &adminError{http.StatusNotFound, "model: " + strconv.Quote(name) + " is unknown"})
	}
	s.letAllGo(model, time.Now())
	s.log.Info("thresholds changed", "model", model, "client", c.Request().RemoteAddr,
		"old", newThresholdsBody(old), "new", newThresholdsBody(t))
	return c.JSON(http.StatusOK, modelThresholds{model, newThresholdsBody(t)})
}

// readThresholds decodes and judges a body. Nothing is looked up: a bad value is told before an
// unknown model is.
func readThresholds(raw []byte) (model string, t busy.Thresholds, bad *adminError) {
	c := cursor{b: raw}
	if c.skip(0) != nil || c.peek() != 0 || c.i < len(raw) {
		return "", t, &adminError{http.StatusBadRequest, "the body is not valid JSON"}
	}
	var fields map[string]json.RawMessage
	if err := json.Unmarshal(raw, &fields); err != nil || fields == nil {
		return "", t, &adminError{http.StatusUnprocessableEntity, "the body must be a JSON object"}
	}
	if fields["model"] == nil || string(fields["model"]) == "null" || json.Unmarshal(fields["model"], &model) != nil {
		return "", t, &adminError{http.StatusUnprocessableEntity, "model: must be a string"}
	}
	if t.DecodeFrac, bad = readFrac(fields, decodeField); bad != nil {
		return "", t, bad
	}
	if t.PrefillTokens, bad = readCount(fields, prefillField); bad != nil {
		return "", t, bad
	}
	if t.PrefillFrac, bad = readFrac(fields, fracField); bad != nil {
		return "", t, bad
	}
	if err := t.Validate(); err != nil {
		return "", t, &adminError{http.StatusBadRequest, err.Error()}
	}
	if model == "" {
		return "", t, &adminError{http.StatusBadRequest, "model: must not be empty"}
	}
	return model, t, nil
}

func given(fields map[string]json.RawMessage, name string) (string, bool) {
	raw := string(fields[name])
	return raw, raw != "" && raw != "null"
}

// readFrac reads a number. One too large for a float64 becomes infinite, which Validate refuses.
func readFrac(fields map[string]json.RawMessage, name string) (*float64, *adminError) {
	raw, ok := given(fields, name)
	if !ok {
		return nil, nil
	}
	if kindOf(raw[0]) != numeric {
		return nil, &adminError{http.StatusUnprocessableEntity, name + ": must be a number"}
	}
	f, err := strconv.ParseFloat(raw, 64)
	if err != nil && !math.IsInf(f, 0) {
		return nil, &adminError{http.StatusUnprocessableEntity, name + ": must be a number"}
	}
	if f == 0 {
		f = 0 // -0 would be shown as that
	}
	return &f, nil
}

func readCount(fields map[string]json.RawMessage, name string) (*uint64, *adminError) {
	raw, ok := given(fields, name)
	if !ok {
		return nil, nil
	}
	n, err := strconv.ParseInt(raw, 10, 64)
	if err != nil || n < 0 || raw == "-0" {
		return nil, &adminError{http.StatusUnprocessableEntity, name + ": must be an integer from 0 to 2^63-1"}
	}
	return new(uint64(n)), nil
}
