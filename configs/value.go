package configs

import (
	"errors"
	"fmt"
	"math"
	"reflect"
	"strconv"
	"strings"
	"time"
)

// ownForm is a setting that reads itself: from one line of text (flag, variable) or from what
// the YAML parser made of its part of the file. Workers and Aliases have it.
type ownForm interface {
	fromText(text string) error
	fromFile(value any) error
}

var (
	durationType = reflect.TypeFor[time.Duration]()
	ownFormType  = reflect.TypeFor[ownForm]()
	byRankType   = reflect.TypeFor[map[uint32]string]()
)

// readable tells whether assign knows the type.
func readable(t reflect.Type) bool {
	if reflect.PointerTo(t).Implements(ownFormType) {
		return true
	}
	switch t.Kind() {
	case reflect.String, reflect.Bool, reflect.Int, reflect.Int64, reflect.Uint32, reflect.Uint64, reflect.Float64:
		return t.Kind() != reflect.Int64 || t == durationType
	case reflect.Slice:
		return t.Elem().Kind() == reflect.String
	case reflect.Map:
		return t == byRankType
	case reflect.Pointer:
		return t.Elem().Kind() != reflect.Pointer && readable(t.Elem())
	case reflect.Struct:
		settingsOf(reflect.New(t).Interface()) // panics if one of its fields is not
		return true
	}
	return false
}

// assign reads value, which is text or of a type that YAML has, into the field to.
func assign(to reflect.Value, value any) error {
	text, isText := value.(string)
	if own, ok := to.Addr().Interface().(ownForm); ok {
		if isText {
			return own.fromText(text)
		}
		return own.fromFile(value)
	}
	switch {
	case to.Kind() == reflect.Pointer:
		return assignUnsettable(to, value)
	case to.Kind() == reflect.Slice:
		return assignList(to, value)
	case to.Kind() == reflect.Struct:
		return assignMap(to, value)
	case to.Kind() == reflect.Map:
		return assignByRank(to, value)
	case value == nil:
		return errors.New("has no value")
	case isText:
		return assignText(to, text)
	}
	switch v := value.(type) {
	case bool:
		if to.Kind() != reflect.Bool {
			return fmt.Errorf("%v is not %s", v, wanted(to.Type()))
		}
		to.SetBool(v)
		return nil
	case map[string]any, []any:
		return fmt.Errorf("is a list or a map, not %s", wanted(to.Type()))
	}
	return fmt.Errorf("%v is not %s", value, wanted(to.Type()))
}

// assignUnsettable reads a value for which nil, the word None and nothing mean "unset".
func assignUnsettable(to reflect.Value, value any) error {
	text, isText := value.(string)
	if value == nil || isText && (text == "" || strings.EqualFold(text, "none")) {
		to.SetZero()
		return nil
	}
	fresh := reflect.New(to.Type().Elem())
	if err := assign(fresh.Elem(), value); err != nil {
		return err
	}
	to.Set(fresh)
	return nil
}

// assignMap reads a map into a struct by the keys of its fields. A key that is none of them is an
// error.
func assignMap(to reflect.Value, value any) error {
	entries, ok := value.(map[string]any)
	if !ok {
		return errors.New("is not a map of keys")
	}
	known := settingsOf(to.Addr().Interface())
	for _, key := range sortedKeys(entries) {
		s, ok := known.find(key)
		if !ok {
			return fmt.Errorf("unknown key %s", key)
		}
		if err := assign(to.FieldByIndex(s.index), entries[key]); err != nil {
			return fmt.Errorf("%s: %w", key, err)
		}
	}
	return nil
}

// assignByRank reads a map of rank to text.
func assignByRank(to reflect.Value, value any) error {
	entries, ok := value.(map[string]any)
	if !ok && value != nil {
		return errors.New("is not a map of rank to text")
	}
	next := map[uint32]string{}
	for _, key := range sortedKeys(entries) {
		dp, err := strconv.ParseUint(key, 10, 32)
		if err != nil {
			return fmt.Errorf("%s: is no rank", key)
		}
		text, ok := entries[key].(string)
		if !ok {
			return fmt.Errorf("%s: %v is not text", key, entries[key])
		}
		next[uint32(dp)] = text
	}
	to.Set(reflect.ValueOf(next))
	return nil
}

func assignList(to reflect.Value, value any) error {
	var items []string
	switch v := value.(type) {
	case nil:
	case string:
		items = splitList(v)
	case []any:
		for i, item := range v {
			text, ok := item.(string)
			if !ok {
				return fmt.Errorf("entry %d: %v is not text: put it in quotes", i+1, item)
			}
			items = append(items, text)
		}
	default:
		return fmt.Errorf("%v is not a list", value)
	}
	list := reflect.MakeSlice(to.Type(), len(items), len(items))
	for i, item := range items {
		list.Index(i).SetString(item)
	}
	to.Set(list)
	return nil
}

// splitList takes a list of one line apart: entries are separated by commas, spaces around
// them and empty entries do not count.
func splitList(text string) []string {
	var items []string
	for item := range strings.SplitSeq(text, ",") {
		if item = strings.TrimSpace(item); item != "" {
			items = append(items, item)
		}
	}
	return items
}

// exactList is splitList with every entry as it is, in the form of a list of the file.
func exactList(text string) (items []any) {
	for item := range strings.SplitSeq(text, ",") {
		items = append(items, item)
	}
	return items
}

func assignText(to reflect.Value, text string) error {
	if to.Kind() == reflect.String {
		to.SetString(text)
		return nil
	}
	text = strings.TrimSpace(text)
	if to.Type() == durationType {
		d, err := time.ParseDuration(text)
		if err != nil {
			return fmt.Errorf("%q is not %s", text, wanted(to.Type()))
		}
		to.SetInt(int64(d))
		return nil
	}
	var err error
	switch to.Kind() {
	case reflect.Bool:
		var on bool
		on, err = parseBool(text)
		to.SetBool(on)
		return err
	case reflect.Int:
		var n int64
		n, err = strconv.ParseInt(text, 10, to.Type().Bits())
		to.SetInt(n)
	case reflect.Uint32, reflect.Uint64:
		var n uint64
		n, err = strconv.ParseUint(text, 10, to.Type().Bits())
		to.SetUint(n)
	case reflect.Float64:
		var x float64
		x, err = strconv.ParseFloat(text, 64)
		to.SetFloat(x)
	}
	if errors.Is(err, strconv.ErrRange) {
		return fmt.Errorf("%s is too large or too small", text)
	}
	if err != nil {
		return fmt.Errorf("%q is not %s", text, wanted(to.Type()))
	}
	return nil
}

// wanted says what a value of the type looks like.
func wanted(t reflect.Type) string {
	if t == durationType {
		return `a duration such as 500ms, 5s or 1m30s`
	}
	switch t.Kind() {
	case reflect.Bool:
		return "true or false"
	case reflect.Int:
		return "a whole number"
	case reflect.Uint32, reflect.Uint64:
		return "a whole number of at least 0"
	case reflect.Float64:
		return "a number"
	}
	return "text"
}

// parseBool reads 1, true, yes, on and 0, false, no, off in any case. Nothing is false: that
// is what an empty variable says.
func parseBool(text string) (bool, error) {
	switch strings.ToLower(strings.TrimSpace(text)) {
	case "1", "true", "yes", "on":
		return true, nil
	case "0", "false", "no", "off", "":
		return false, nil
	}
	return false, fmt.Errorf("%q is not %s", text, wanted(reflect.TypeFor[bool]()))
}

// dynUnit is the unit of a DYN_ variable that takes a bare number for a duration, or 0.
func dynUnit(s setting) time.Duration {
	switch {
	case s.typ != durationType:
		return 0
	case strings.HasSuffix(s.dyn, "_MS"):
		return time.Millisecond
	case strings.HasSuffix(s.dyn, "_SECS"), s.dynUnit == "s":
		return time.Second
	}
	return 0
}

func bareDuration(text string, unit time.Duration) (time.Duration, error) {
	x, err := strconv.ParseFloat(strings.TrimSpace(text), 64)
	if err != nil || math.IsNaN(x) {
		return 0, fmt.Errorf("%q is not a number of units of %v", text, unit)
	}
	if d := x * float64(unit); math.Abs(d) < math.MaxInt64 {
		return time.Duration(math.Round(d)), nil
	}
	return 0, fmt.Errorf("%s is too large", text)
}

// format is the text of a default, as it could be typed.
func format(v reflect.Value) string {
	switch {
	case v.Kind() == reflect.Pointer && v.IsNil():
		return ""
	case v.Kind() == reflect.Pointer:
		return format(v.Elem())
	}
	switch x := v.Interface().(type) {
	case Workers:
		return x.String()
	case time.Duration:
		return shortDuration(x)
	case []string:
		return strings.Join(x, ",")
	}
	return fmt.Sprint(v.Interface())
}

// shortDuration is d without the zero minutes and seconds that Duration.String ends with.
func shortDuration(d time.Duration) string {
	if d == 0 {
		return "0"
	}
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}
