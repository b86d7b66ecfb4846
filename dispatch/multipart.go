package dispatch

import (
	"bytes"
	"encoding/json"
	"errors"
	"mime/multipart"
	"net/url"
	"slices"
	"strconv"
	"time"
)

// gcsMultipart sends requests that name a file in a Google bucket as forms, for the providers that
// want that.
type gcsMultipart struct {
	Providers []string `json:"providers"`
}

func (t *gcsMultipart) uri(m *message, fields []member) string {
	if !slices.Contains(t.Providers, m.metadata["provider"]) {
		return ""
	}
	return textOf(fields, "gcs_uri")
}

// textOf is a field that is a string, "" for any other.
func textOf(fields []member, key string) (text string) {
	if at := find(fields, key); at >= 0 {
		_ = json.Unmarshal(fields[at].value, &text)
	}
	return text
}

func (t *gcsMultipart) validate(m *message, fields []member) error {
	uri := t.uri(m, fields)
	if uri == "" {
		return nil
	}
	if textOf(fields, "file_base64") != "" {
		return errors.New("gcs_uri and file_base64 are both set")
	}
	if until, ok := signedUntil(uri); ok && !until.After(m.deadline) {
		return errors.New("the signed URL in gcs_uri expires before the deadline")
	}
	return nil
}

// signedUntil is when a signed URL expires, of either version; false if it does not say so.
func signedUntil(uri string) (time.Time, bool) {
	u, err := url.Parse(uri)
	if err != nil {
		return time.Time{}, false
	}
	q := u.Query()
	if at, err := time.Parse("20060102T150405Z", q.Get("X-Goog-Date")); err == nil {
		if s, err := strconv.ParseInt(q.Get("X-Goog-Expires"), 10, 32); err == nil {
			return at.Add(time.Duration(s) * time.Second), true
		}
	}
	if s, err := strconv.ParseInt(q.Get("Expires"), 10, 64); err == nil {
		return time.Unix(s, 0), true
	}
	return time.Time{}, false
}

func (t *gcsMultipart) transform(m *message, fields []member) ([]byte, string, bool, error) {
	uri := t.uri(m, fields)
	if uri == "" {
		return nil, "", false, nil
	}
	var b bytes.Buffer
	w := multipart.NewWriter(&b)
	err := w.WriteField("url", uri)
	for _, f := range fields {
		if f.key == "gcs_uri" || f.key == "file_base64" {
			continue
		}
		value := string(f.value)
		var text string
		if json.Unmarshal(f.value, &text) == nil && string(f.value) != "null" {
			value = text
		}
		err = errors.Join(err, w.WriteField(f.key, value))
	}
	err = errors.Join(err, w.Close())
	return b.Bytes(), w.FormDataContentType(), err == nil, err
}
