package monitor

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"mime"
	"net"
	"net/http"
	"sync"
	"time"
)

// failure is why a look at a worker brought nothing: one of the reasons, and the cause.
type failure struct {
	reason string
	err    error
}

func (f *failure) Error() string { return f.err.Error() }
func (f *failure) Unwrap() error { return f.err }

// maxPage bounds what is read of a page, after decompression.
const maxPage = 16 << 20

// getter asks workers. It is safe for concurrent use.
type getter struct {
	client  *http.Client
	buffers sync.Pool // of *bytes.Buffer
}

// newGetter has connections of its own, so that looking after workers and serving clients
// never wait for one another.
func newGetter() *getter {
	return &getter{
		client: &http.Client{
			Transport: &http.Transport{
				DialContext:         (&net.Dialer{Timeout: 5 * time.Second}).DialContext,
				MaxIdleConnsPerHost: 2,
				// vLLM's server closes idle connections after 5 s; this side goes first.
				IdleConnTimeout:        4 * time.Second,
				MaxResponseHeaderBytes: 1 << 20,
			},
			CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
		},
		buffers: sync.Pool{New: func() any { return new(bytes.Buffer) }},
	}
}

// get asks for url and hands the body of a 2xx answer to use, which must not keep it; whole is
// false if the answer ended too early. The error is a *failure, or that of use.
func (g *getter) get(ctx context.Context, url, key, accept string, use func(body []byte, whole bool) error) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return &failure{reasonConnect, err}
	}
	req.Header.Set("Accept", accept)
	req.Header.Set("User-Agent", "spillway")
	if key != "" {
		req.Header.Set("Authorization", "Bearer "+key)
	}
	resp, err := g.client.Do(req)
	if err != nil {
		return &failure{reasonOf(err), err}
	}
	defer resp.Body.Close()
	if resp.StatusCode < 200 || resp.StatusCode > 299 {
		io.CopyN(io.Discard, resp.Body, 64<<10) // so that the connection can be used again
		err := fmt.Errorf("%s answered %s", url, resp.Status)
		if resp.StatusCode == http.StatusNotFound {
			err = fmt.Errorf("%w: %w", err, errNotHere)
		}
		return &failure{reasonStatus, err}
	}
	if accept == acceptText && isJSON(resp.Header.Get("Content-Type")) {
		return &failure{reasonMissing, fmt.Errorf("%s answered JSON: %w", url, errNotHere)} // unread
	}
	body := g.buffers.Get().(*bytes.Buffer)
	body.Reset()
	defer func() {
		if body.Cap() <= 1<<20 { // one huge page shall not stay
			g.buffers.Put(body)
		}
	}()
	n, err := io.Copy(body, io.LimitReader(resp.Body, maxPage+1))
	switch {
	case n > maxPage:
		return &failure{reasonParse, fmt.Errorf("%s answered more than %d bytes", url, maxPage)}
	case err != nil && !errors.Is(err, io.ErrUnexpectedEOF):
		return &failure{reasonOf(err), err}
	}
	return use(body.Bytes(), err == nil)
}

// errNotHere is that what was asked for is not to be found under that path.
var errNotHere = errors.New("it is not to be found here")

func isJSON(contentType string) bool {
	kind, _, err := mime.ParseMediaType(contentType)
	return err == nil && kind == "application/json"
}

// reasonOf tells a worker that is too slow from one that is not there.
func reasonOf(err error) string {
	var ne net.Error
	if errors.Is(err, context.DeadlineExceeded) || errors.As(err, &ne) && ne.Timeout() {
		return reasonTimeout
	}
	return reasonConnect
}

// pause sleeps, or returns false at once when ctx ends.
func pause(ctx context.Context, d time.Duration) bool {
	if ctx.Err() != nil {
		return false
	}
	t := time.NewTimer(d)
	defer t.Stop()
	select {
	case <-ctx.Done():
		return false
	case <-t.C:
		return true
	}
}
