package configs

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"spillway/worker"
)

// Workers are the statically configured workers: on one line their URLs, separated by commas;
// in the YAML file a list of URLs or of maps with the keys of worker.Worker. Records are
// normalized, IDs and names are unique. What the file says of a worker holds also where a flag
// or variable lists its URL; workers of the file that such a list leaves out are left out.
type Workers []worker.Worker

// String is the list of URLs, for --help.
func (w Workers) String() string {
	urls := make([]string, len(w))
	for i := range w {
		urls[i] = w[i].Endpoint
	}
	return strings.Join(urls, ",")
}

func (w *Workers) fromText(text string) error {
	var next Workers
	for i, url := range splitList(text) {
		record, err := worker.Worker{Endpoint: url}.Normalize()
		if err != nil {
			return fmt.Errorf("entry %d: %w", i+1, err)
		}
		if at := slices.IndexFunc(*w, func(o worker.Worker) bool { return o.Endpoint == record.Endpoint }); at >= 0 {
			record = (*w)[at]
		}
		if next, err = next.with(record); err != nil {
			return fmt.Errorf("entry %d: %w", i+1, err)
		}
	}
	*w = next
	return nil
}

func (w *Workers) fromFile(value any) error {
	if value == nil {
		*w = nil
		return nil
	}
	list, ok := value.([]any)
	if !ok {
		return errors.New("is not a list")
	}
	var next Workers
	for i, item := range list {
		record, err := workerFromFile(item)
		if err == nil {
			next, err = next.with(record)
		}
		if err != nil {
			return fmt.Errorf("entry %d: %w", i+1, err)
		}
	}
	*w = next
	return nil
}

func (w Workers) with(record worker.Worker) (Workers, error) {
	for _, o := range w {
		switch {
		case o.Endpoint == record.Endpoint:
			return nil, fmt.Errorf("url: %s is listed twice", o.Endpoint)
		case o.ID == record.ID:
			return nil, fmt.Errorf("instance_id: %v is also that of %s", o.ID, o.Name)
		case o.Name == record.Name:
			return nil, fmt.Errorf("name: %s is also that of %s", o.Name, o.Endpoint)
		}
	}
	return append(w, record), nil
}

func workerFromFile(item any) (worker.Worker, error) {
	var record worker.Worker
	switch v := item.(type) {
	case string:
		record.Endpoint = v
	case map[string]any:
		if err := assignMap(reflect.ValueOf(&record).Elem(), v); err != nil {
			return record, err
		}
	default:
		return record, errors.New("is neither a URL nor a map of keys")
	}
	return record.Normalize()
}

// Aliases are further names for models, from the YAML file: a map of alias to model.
type Aliases map[string]string

func (a *Aliases) fromText(string) error {
	return errors.New("is not a map of alias to model")
}

func (a *Aliases) fromFile(value any) error {
	entries, ok := value.(map[string]any)
	if !ok && value != nil {
		return errors.New("is not a map of alias to model")
	}
	next := Aliases{}
	for _, alias := range sortedKeys(entries) {
		model, ok := entries[alias].(string)
		if alias == "" || !ok || model == "" {
			return fmt.Errorf("%s: needs the name of a model", alias)
		}
		next[alias] = model
	}
	*a = next
	return nil
}
