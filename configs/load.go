// Package configs makes the Config of each command from those of the packages it runs, and
// fills it from its sources. A setting is declared once, beside the code that uses it, by a
// field with the tags koanf (its key), usage, and dyn (a variable of NVIDIA Dynamo that means
// the same); one key then names it everywhere: --drain-timeout, SPILLWAY_DRAIN_TIMEOUT,
// DYN_HTTP_GRACEFUL_SHUTDOWN_TIMEOUT_SECS, and drain-timeout in the YAML file.
package configs

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"os"
	"reflect"
	"strconv"
	"strings"

	"github.com/knadh/koanf/parsers/yaml"
	"github.com/knadh/koanf/providers/confmap"
	"github.com/knadh/koanf/providers/env/v2"
	"github.com/knadh/koanf/providers/file"
	"github.com/knadh/koanf/v2"
	"github.com/spf13/pflag"
	yamlv3 "go.yaml.in/yaml/v3"
)

// PathKey is the key of the YAML file itself: --config, SPILLWAY_CONFIG.
const PathKey = "config"

// Validator is what every command's Config is: a value that can tell whether it makes sense.
// Each of its errors (joined ones are taken apart) begins with the key it is about and ": ".
type Validator interface{ Validate() error }

// A Config may also have the method
//
//	Deprecated() map[string]string
//
// which names keys that are accepted and ignored, and what to tell those who still set them.
type deprecating interface{ Deprecated() map[string]string }

// A Config may also have the method
//
//	Ineffective() error
//
// which is asked of one that Validate has passed. Its findings, of the same form, are for the log alone.
type ineffective interface{ Ineffective() error }

// A part of a Config that is squashed may also have the method ReadFiles, to read the files that
// its settings name. Its errors are like those of Validate.
type fileReading interface {
	ReadFiles(read func(path string) ([]byte, error)) error
}

// readFiles has all parts of a Config that name files read them.
func readFiles(config reflect.Value) error {
	var errs []error
	if part, ok := config.Addr().Interface().(fileReading); ok {
		errs = append(errs, part.ReadFiles(os.ReadFile))
	}
	for i := range config.NumField() {
		if config.Type().Field(i).Tag.Get("koanf") == ",squash" {
			errs = append(errs, readFiles(config.Field(i)))
		}
	}
	return errors.Join(errs...)
}

// Error is one bad setting. Its text is one line that names the key and where it was set.
type Error struct {
	Key    string // "" if the source as a whole is bad
	Source string // such as "flag --port", "variable SPILLWAY_PORT", "file a.yaml" or "default"
	Err    error
}

// Error is the line to show to the user.
func (e *Error) Error() string {
	if e.Key == "" {
		return fmt.Sprintf("%s: %v", e.Source, e.Err)
	}
	return fmt.Sprintf("%s: %v (from %s)", e.Key, e.Err, e.Source)
}

// Unwrap returns the cause.
func (e *Error) Unwrap() error { return e.Err }

// Load lays the sources over def, weakest first: the YAML file at path, the documented DYN_*
// variables, SPILLWAY_* variables, and the flags that were given (of a set that Flags has
// filled). With path "" the file is the one that SPILLWAY_CONFIG names, or none. The warnings
// are lines for the log: settings that were ignored. The error joins one *Error for each
// unknown key, bad value and finding of Validate; the Config is then of no use.
func Load[C Validator](def C, path string, environ func() []string, flags *pflag.FlagSet) (C, []string, error) {
	cfg := def
	l := loader{settings: settingsOf(&cfg), def: reflect.ValueOf(&def).Elem(), from: map[string]string{}}
	if d, ok := any(def).(deprecating); ok {
		l.deprecated = d.Deprecated()
	}
	l.target = reflect.ValueOf(&cfg).Elem()
	ours := l.read("environment", env.Provider("", env.Opt{Prefix: "SPILLWAY_", EnvironFunc: environ}), nil)
	if p, ok := ours[variable(PathKey)].(string); ok && path == "" {
		path = p
	}
	if path != "" {
		l.file(path)
	}
	l.dynVariables(l.read("environment", env.Provider("", env.Opt{Prefix: "DYN_", EnvironFunc: environ}), nil))
	l.ourVariables(ours)
	l.flags(flags)
	if len(l.errs) == 0 {
		l.check(func() error { return errors.Join(readFiles(l.target), cfg.Validate()) })
	}
	if err := errors.Join(l.errs...); err != nil {
		return def, l.warnings, err
	}
	if c, ok := any(cfg).(ineffective); ok {
		l.warnings = append(l.warnings, l.inSettings(c.Ineffective())...)
	}
	return cfg, l.warnings, nil
}

// loader lays sources over one Config and remembers where each value came from.
type loader struct {
	settings   settings
	deprecated map[string]string
	target     reflect.Value     // the Config being filled
	def        reflect.Value     // the Config of defaults
	from       map[string]string // key -> the source that set it last
	warnings   []string
	errs       []error
}

// read gets one source's keys and values by koanf. A source that cannot be read is an error
// and has no keys.
func (l *loader) read(name string, p koanf.Provider, parser koanf.Parser) map[string]any {
	k := koanf.New(".")
	if err := k.Load(p, parser); err != nil {
		l.errs = append(l.errs, &Error{Source: name, Err: err})
		return nil
	}
	return k.Raw()
}

func (l *loader) file(path string) {
	source := "file " + path
	values := l.read(source, file.Provider(path), &oneDocument{})
	for _, key := range sortedKeys(values) {
		l.set(key, source, values[key])
	}
}

// histogramPrefix begins the variables that shape histogram buckets; package proxy reads them.
const histogramPrefix = "SPILLWAY_HISTOGRAM_"

func (l *loader) ourVariables(values map[string]any) {
	keys := map[string]string{variable(PathKey): ""}
	for _, s := range l.settings {
		if !s.fileOnly {
			keys[variable(s.key)] = s.key
		}
	}
	for key := range l.deprecated {
		keys[variable(key)] = key
	}
	for _, name := range sortedKeys(values) {
		key, known := keys[name]
		switch {
		case strings.HasPrefix(name, histogramPrefix), known && key == "":
		case known:
			l.set(key, "variable "+name, values[name])
		default:
			l.errs = append(l.errs, &Error{Key: name, Source: "the environment", Err: errors.New("unknown variable")})
		}
	}
}

func (l *loader) dynVariables(values map[string]any) {
	for _, s := range l.settings { // an unknown DYN_* is not ours
		text, ok := l.dynText(s, s.dyn, values)
		source := "variable " + s.dyn
		if !ok && s.older != "" {
			text, ok = l.dynText(s, s.older, values)
			source = "variable " + s.older
		}
		if s.dynIf != "" {
			gate, _ := values[s.dynIf].(string)
			on, err := parseBool(gate)
			if err != nil {
				l.fail(s, "variable "+s.dynIf, err)
			}
			if err != nil || !on {
				continue
			}
			if !ok {
				text, ok, source = s.dynElse, true, "variable "+s.dynIf
			}
		}
		if s.dyn == "" || !ok {
			continue
		}
		if s.dynBool != "" {
			on, err := parseBool(text)
			if err != nil {
				l.fail(s, source, err)
			}
			if err != nil || !on {
				continue
			}
			text = s.dynBool
		}
		var value any = text
		if unit := dynUnit(s); unit != 0 {
			d, err := bareDuration(text, unit)
			if err != nil {
				l.fail(s, source, err)
				continue
			}
			value = d.String()
		}
		l.set(s.key, source, value)
	}
}

// dynText is what a DYN_ variable says, false if it is not set. For a setting of which unreadable
// values do not count, those are as good as none.
func (l *loader) dynText(s setting, name string, values map[string]any) (string, bool) {
	text, ok := values[name].(string)
	if !ok || s.bad != "unreadable" {
		return text, ok
	}
	if strings.TrimSpace(text) == "" {
		return "", false
	}
	if err := assign(reflect.New(s.typ).Elem(), text); err != nil {
		l.warnings = append(l.warnings, (&Error{Key: s.key, Source: "variable " + name, Err: err}).Error()+": ignored")
		return "", false
	}
	return text, true
}

func (l *loader) flags(flags *pflag.FlagSet) {
	if flags == nil {
		return
	}
	typed := map[string]any{}
	flags.Visit(func(f *pflag.Flag) {
		if _, ok := f.Value.(*typedFlag); ok && f.Name != PathKey {
			typed[f.Name] = f.Value.String()
		}
	})
	values := l.read("flags", confmap.Provider(typed, ""), nil)
	for _, key := range sortedKeys(values) {
		value, source := values[key], "flag --"+key
		if on, ok := strings.CutPrefix(key, negation); ok && !l.knows(key) {
			if _, both := values[on]; both {
				l.errs = append(l.errs, &Error{Key: on, Source: source, Err: errors.New("is turned on and off")})
				continue
			}
			off, err := parseBool(fmt.Sprint(value))
			if err != nil {
				l.errs = append(l.errs, &Error{Key: key, Source: source, Err: err})
				continue
			}
			key, value = on, strconv.FormatBool(!off)
		}
		l.set(key, source, value)
	}
}

func (l *loader) knows(key string) bool {
	_, ok := l.settings.find(key)
	_, old := l.deprecated[key]
	return ok || old
}

// set takes one value of one source: text, or what the YAML parser made of it.
func (l *loader) set(key, source string, value any) {
	if advice, ok := l.deprecated[key]; ok {
		l.warnings = append(l.warnings, fmt.Sprintf("%s: ignored: %s (from %s)", key, advice, source))
		return
	}
	s, ok := l.settings.find(key)
	if !ok {
		l.errs = append(l.errs, &Error{Key: key, Source: source, Err: errors.New("unknown key")})
		return
	}
	if text, ok := value.(string); ok && s.exact && text != "" {
		value = exactList(text)
	}
	if err := assign(l.target.FieldByIndex(s.index), value); err != nil {
		l.fail(s, source, err)
		return
	}
	l.from[key] = source
}

// fail notes a bad value: as an error, or as a warning where the setting's specification says
// that a bad value means the default.
func (l *loader) fail(s setting, source string, err error) {
	e := &Error{Key: s.key, Source: source, Err: err}
	if !s.forgives(source) {
		l.errs = append(l.errs, e)
		return
	}
	l.target.FieldByIndex(s.index).Set(l.def.FieldByIndex(s.index))
	l.from[s.key] = "default"
	l.warnings = append(l.warnings, e.Error()+": using the default")
}

// check asks Validate, tells of each finding which source it is about, and asks again if the
// findings were all of the kind that a default mends.
func (l *loader) check(validate func() error) {
	for range len(l.settings) + 1 {
		found := leaves(validate())
		if len(found) == 0 {
			return
		}
		before := len(l.warnings)
		for _, err := range found {
			l.found(err)
		}
		if len(l.errs) > 0 || len(l.warnings) == before {
			return
		}
	}
}

func (l *loader) found(err error) {
	e := l.about(err)
	s, ok := l.settings.find(e.Key)
	if !ok {
		l.errs = append(l.errs, err)
		return
	}
	l.fail(s, e.Source, e.Err)
}

// about is a finding with the source of the setting that it begins with.
func (l *loader) about(finding error) *Error {
	key, text, _ := strings.Cut(finding.Error(), ":")
	return &Error{Key: key, Source: cmp.Or(l.from[key], "default"), Err: errors.New(strings.TrimSpace(text))}
}

// inSettings are findings as lines for the log.
func (l *loader) inSettings(findings error) (lines []string) {
	for _, err := range leaves(findings) {
		lines = append(lines, l.about(err).Error())
	}
	return lines
}

// leaves takes joined errors apart.
func leaves(err error) []error {
	if err == nil {
		return nil
	}
	joined, ok := err.(interface{ Unwrap() []error })
	if !ok {
		return []error{err}
	}
	var all []error
	for _, e := range joined.Unwrap() {
		all = append(all, leaves(e)...)
	}
	return all
}

// variable is the name of the environment variable for a key.
func variable(key string) string {
	return "SPILLWAY_" + strings.ToUpper(strings.ReplaceAll(key, "-", "_"))
}

// oneDocument parses a YAML file. A second document in it would be skipped silently by the
// parser, and the limits in it with it, so it is refused.
type oneDocument struct{ yaml.YAML }

// Unmarshal implements koanf.Parser. Numbers and dates stay text as written, so that a value
// reads the same in the file as in a flag: 007 is a fine API key, and 10000.0 no count.
func (*oneDocument) Unmarshal(b []byte) (map[string]any, error) {
	dec := yamlv3.NewDecoder(bytes.NewReader(b))
	var doc, more yamlv3.Node
	values := map[string]any{}
	if err := dec.Decode(&doc); errors.Is(err, io.EOF) {
		return values, nil
	} else if err != nil {
		return nil, err
	}
	if err := dec.Decode(&more); err == nil {
		return nil, errors.New("holds more than one YAML document")
	} else if !errors.Is(err, io.EOF) {
		return nil, err
	}
	asWritten(&doc)
	return values, doc.Decode(&values)
}

// asWritten makes text of all scalars but booleans and nulls.
func asWritten(n *yamlv3.Node) {
	if n.Kind == yamlv3.ScalarNode {
		switch n.ShortTag() {
		case "!!int", "!!float", "!!timestamp":
			n.Tag = "!!str"
		}
	}
	for _, child := range n.Content {
		asWritten(child)
	}
}
