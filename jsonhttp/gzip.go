package jsonhttp

import (
	"compress/gzip"
	"io"
	"net/http"
	"strconv"
	"strings"
)

// SendLong writes an answer of status 200 that write makes piece by piece, compressed if the client
// takes that. It returns write's error.
func SendLong(w http.ResponseWriter, r *http.Request, write func(io.Writer) error) error {
	h := w.Header()
	h["Content-Type"] = jsonType
	if !acceptsGzip(r.Header.Values("Accept-Encoding")) {
		return write(w)
	}
	h["Content-Encoding"] = []string{"gzip"}
	zip, err := gzip.NewWriterLevel(w, gzip.BestSpeed)
	if err != nil {
		return err
	}
	defer func() { _ = zip.Close() }() // a client that has left hears nothing
	return write(zip)
}

// acceptsGzip tells whether a client takes gzip.
func acceptsGzip(headers []string) bool {
	for _, header := range headers {
		for coding := range strings.SplitSeq(header, ",") {
			name, quality, _ := strings.Cut(coding, ";")
			if strings.EqualFold(strings.TrimSpace(name), "gzip") {
				q, given := strings.CutPrefix(strings.TrimSpace(quality), "q=")
				v, err := strconv.ParseFloat(q, 64)
				return !given || err == nil && v > 0
			}
		}
	}
	return false
}
