package configs

import (
	"fmt"
	"maps"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/spf13/pflag"
)

// setting is one tagged field of a Config, found by reflection.
type setting struct {
	key      string
	index    []int  // of the field, for reflect's FieldByIndex
	usage    string // for --help
	dyn      string // documented DYN_ variable, or ""
	older    string // another one that means the same, which counts where dyn is not set or cannot be read, or ""
	dynBool  string // if not "", dyn is a boolean, and true means this value
	dynUnit  string // "s": dyn takes bare seconds though its name does not say so
	dynIf    string // if not "", a boolean variable without which dyn does not count
	dynElse  string // what dyn counts as if dynIf is true and dyn is not set
	bad      string // "dyn": a bad value of dyn means the default, with a warning; "unreadable": one of the wrong kind, or empty, does not count
	fileOnly bool   // has neither flag nor variable
	exact    bool   // a list whose entries count as they are, empty ones too
	typ      reflect.Type
}

// forgives tells whether a bad value from source is a warning rather than an error.
func (s setting) forgives(source string) bool {
	return s.bad == "dyn" && source == "variable "+s.dyn
}

type settings []setting

func (all settings) find(key string) (setting, bool) {
	for _, s := range all {
		if s.key == key {
			return s, true
		}
	}
	return setting{}, false
}

// settingsOf lists the settings of the struct that config points to, in the order of its
// fields. Two fields of one key, or one of a kind that cannot be read, are bugs and panic.
func settingsOf(config any) settings {
	all := fieldsOf(reflect.TypeOf(config).Elem(), nil)
	seen := map[string]bool{}
	for _, s := range all {
		for _, name := range []string{s.key, s.dyn, s.older} {
			if name != "" && seen[name] {
				panic(fmt.Sprintf("configs: %T: two settings are called %s", config, name))
			}
			seen[name] = true
		}
		if !readable(s.typ) {
			panic(fmt.Sprintf("configs: %T: %s is a %v", config, s.key, s.typ))
		}
	}
	return all
}

func fieldsOf(t reflect.Type, at []int) settings {
	var all settings
	for i := range t.NumField() {
		f := t.Field(i)
		index := append(slices.Clone(at), i)
		key, option, _ := strings.Cut(f.Tag.Get("koanf"), ",")
		switch {
		case option == "squash":
			all = append(all, fieldsOf(f.Type, index)...)
		case key == "" || key == "-":
		default:
			dyn, older, _ := strings.Cut(f.Tag.Get("dyn"), ",")
			all = append(all, setting{
				key: key, index: index, typ: f.Type,
				usage: f.Tag.Get("usage"), dyn: dyn, older: older, dynBool: f.Tag.Get("dynbool"),
				dynUnit: f.Tag.Get("dynunit"), dynIf: f.Tag.Get("dynif"), dynElse: f.Tag.Get("dynelse"),
				bad: f.Tag.Get("bad"), fileOnly: f.Tag.Get("only") == "file", exact: f.Tag.Get("list") == "exact",
			})
		}
	}
	return all
}

// Flags declares --config and a flag for every setting of def, whose values are the defaults
// that --help shows. The flags keep what was typed; Load reads it.
func Flags(fs *pflag.FlagSet, def any) {
	fs.VarPF(&typedFlag{kind: "file"}, PathKey, "", "YAML `file` of settings, by the same keys as the flags (also SPILLWAY_CONFIG)")
	v := reflect.New(reflect.TypeOf(def))
	v.Elem().Set(reflect.ValueOf(def))
	for _, s := range settingsOf(v.Interface()) {
		if s.fileOnly {
			continue
		}
		usage := s.usage
		if s.dyn != "" {
			usage += " [" + s.dyn + "]"
		}
		if s.older != "" {
			usage += " [" + s.older + "]"
		}
		value := &typedFlag{text: format(v.Elem().FieldByIndex(s.index)), kind: kindName(s.typ), list: isList(s.typ)}
		f := fs.VarPF(value, s.key, "", usage)
		if kindName(s.typ) == "bool" {
			f.NoOptDefVal = "true"
		}
		if value.text == "true" { // like Dynamo's --no-router-kv-events
			off := fs.VarPF(&typedFlag{text: "false", kind: "bool"}, negation+s.key, "", "turns off --"+s.key)
			off.NoOptDefVal, off.Hidden = "true", true
		}
	}
	if d, ok := def.(deprecating); ok {
		for _, key := range sortedKeys(d.Deprecated()) {
			fs.VarPF(&typedFlag{kind: "string"}, key, "", "ignored").Hidden = true
		}
	}
}

// negation begins a flag that turns off what is on by default.
const negation = "no-"

// typedFlag is the pflag.Value of a setting. It keeps the text, so that a bad value reads the
// same whichever source it came from; given more than once, a list grows.
type typedFlag struct {
	text  string
	kind  string
	list  bool
	given bool
}

// String is the text as typed, or the default.
func (f *typedFlag) String() string { return f.text }

// Type is the word for the kind of value in --help.
func (f *typedFlag) Type() string { return f.kind }

// Set takes the text as it is.
func (f *typedFlag) Set(text string) error {
	if f.list && f.given {
		text = f.text + "," + text
	}
	f.text, f.given = text, true
	return nil
}

func kindName(t reflect.Type) string {
	for t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	switch {
	case t == reflect.TypeFor[time.Duration]():
		return "duration"
	case isList(t):
		return "list"
	}
	switch t.Kind() {
	case reflect.Bool:
		return "bool"
	case reflect.Float64:
		return "float"
	case reflect.Int, reflect.Uint64, reflect.Uint32:
		return "int"
	}
	return "string"
}

func isList(t reflect.Type) bool { return t.Kind() == reflect.Slice }

func sortedKeys[V any](m map[string]V) []string { return slices.Sorted(maps.Keys(m)) }
