package service

import (
	"cmp"
	"strings"

	"spillway/httperr"
	"spillway/jsonhttp"
	"spillway/worker"
)

// filter is what the query of a list asks for; nil lets all through.
type filter struct{ model, tenant *string }

func comparePartitions(a, b worker.Partition) int {
	return cmp.Or(strings.Compare(a.Model, b.Model), strings.Compare(a.Tenant, b.Tenant))
}

func parseFilter(query string) (f filter, err *httperr.Error) {
	err = jsonhttp.Query(query, jsonhttp.Param{Name: "model_name", To: &f.model}, jsonhttp.Param{Name: "tenant_id", To: &f.tenant})
	return f, err
}
