package dispatch

import (
	"bytes"
	"context"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"net/url"
	"os"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	"spillway/upstream"
)

// gateway is where queues send their requests. It has one of two clients.
type gateway struct {
	authorization string           // of requests that bring none, or ""
	direct        *upstream.Client // in the worker's goroutine
	proxied       *http.Client     // by way of the environment's proxy
	base          string           // then, what is before the paths of requests
}

// dialTimeout is how long a connection to a gateway may take, TLS included.
const dialTimeout = 10 * time.Second

// makeGateways has each queue know where its requests go. Queues with one URL share connections, of
// which there is one for each of all the workers at most.
func (d *Dispatcher) makeGateways(workers int) error {
	conf, err := tlsConfig(d.cfg.TLSCA, d.cfg.TLSCert, d.cfg.TLSKey, d.cfg.TLSInsecure, true)
	if err != nil {
		return fmt.Errorf("tls-ca-cert: %w", err)
	}
	known := map[string]*gateway{}
	for _, q := range d.queues {
		if q.gateway = known[q.BaseURL+" "+q.apiKey]; q.gateway != nil {
			continue
		}
		u, err := url.Parse(q.BaseURL)
		if err != nil {
			return err // it was parsed before
		}
		g := &gateway{}
		switch {
		case q.apiKey != "":
			g.authorization = "Bearer " + q.apiKey
		case u.User != nil:
			password, _ := u.User.Password()
			g.authorization = "Basic " + base64.StdEncoding.EncodeToString([]byte(u.User.Username()+":"+password))
		}
		u = &url.URL{Scheme: u.Scheme, Host: u.Host, Path: strings.TrimRight(u.Path, "/"), RawPath: strings.TrimRight(u.RawPath, "/")}
		proxy, err := http.ProxyFromEnvironment(&http.Request{URL: u})
		switch {
		case err != nil:
			return fmt.Errorf("transport-config: queue %q: the proxy that the environment names: %w", q.Name, err)
		case proxy != nil:
			g.base = u.String()
			g.proxied = &http.Client{
				Transport: &http.Transport{
					Proxy: http.ProxyURL(proxy), TLSClientConfig: conf.Clone(), ForceAttemptHTTP2: true,
					MaxIdleConns: workers, MaxIdleConnsPerHost: workers, IdleConnTimeout: 90 * time.Second,
				},
				CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
			}
		default:
			// Connections are idle for less than gateways let them be, and so seldom found closed.
			if g.direct, err = upstream.New(u, upstream.Config{DialTimeout: dialTimeout, MaxIdle: workers, TLS: conf}); err != nil {
				return fmt.Errorf("transport-config: queue %q: %w", q.Name, err)
			}
		}
		known[q.BaseURL+" "+q.apiKey] = g
		d.gateways = append(d.gateways, g)
		q.gateway = g
	}
	return nil
}

// close closes connections that nobody uses.
func (g *gateway) close() {
	if g.direct != nil {
		g.direct.Close()
	} else {
		g.proxied.CloseIdleConnections()
	}
}

// post is the request of a message, and the answer. Its memory is used again.
type post struct {
	path  string // below the gateway's URL, as it goes on the wire
	lines lines
	body  []byte // that of a message, or made for this request

	head     []byte
	request  upstream.Request
	response upstream.Response
	answer   []byte
	result   []byte // what Redis is told of it
}

const (
	keptBytes = 64 << 10 // larger answers are left to the garbage collector
	firstRoom = 64 << 10 // at most, whatever an answer says of its length
	readRoom  = 4 << 10
)

// trim lets go of what was large.
func (p *post) trim() {
	p.body = nil
	if cap(p.answer) > keptBytes || cap(p.result) > keptBytes {
		p.answer, p.result = nil, nil
	}
}

// send does a request that begins now and reads the answer, up to most bytes, which are valid until p is used
// again. It gives up at a time, or when ctx ends.
func (g *gateway) send(ctx context.Context, p *post, now, until time.Time, most int) (r reply) {
	begun := now
	if g.direct != nil {
		r = g.ask(ctx, p, until, most+1)
	} else {
		r = g.askProxied(ctx, p, until, most+1)
	}
	now = time.Now()
	r.taken = now.Sub(begun)
	r.late = r.err != nil && (errors.Is(r.err, os.ErrDeadlineExceeded) || errors.Is(r.err, context.DeadlineExceeded) || !now.Before(until))
	r.body = p.answer
	if r.err == nil && len(r.body) > most {
		r.status, r.body, r.err = 0, nil, errTooLong
	}
	return r
}

func (g *gateway) ask(ctx context.Context, p *post, until time.Time, most int) reply {
	p.head, p.answer = p.head[:0], p.answer[:0]
	for _, l := range p.lines {
		p.head = upstream.AppendHeader(p.head, l.name, l.value)
	}
	p.request = upstream.Request{Method: http.MethodPost, Path: p.path, Head: p.head, Body: p.body, HeadDeadline: until, Once: true}
	if err := g.direct.DoInto(ctx, &p.request, &p.response); err != nil {
		return reply{err: err, written: !errors.Is(err, upstream.ErrDial) && !errors.Is(err, upstream.ErrRequest)}
	}
	defer p.response.Close()
	r := reply{status: p.response.Status, after: p.response.Header("Retry-After"), dropped: p.response.Header(droppedHeader), written: true}
	if r.err = p.response.SetReadDeadline(until); r.err == nil {
		r.err = p.read(&p.response, int(min(max(p.response.ContentLength, 0), firstRoom)), most)
	}
	return r
}

func (g *gateway) askProxied(ctx context.Context, p *post, until time.Time, most int) reply {
	var written atomic.Bool
	ctx, cancel := context.WithDeadline(httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{WroteHeaders: func() { written.Store(true) }}), until)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, g.base+p.path, bytes.NewReader(p.body))
	if err != nil {
		return reply{err: fmt.Errorf("%w: %w", upstream.ErrRequest, err)}
	}
	req.GetBody = nil // nothing is sent twice behind our back
	for _, l := range p.lines {
		req.Header.Set(l.name, l.value)
	}
	resp, err := g.proxied.Do(req)
	if err != nil {
		return reply{err: err, written: written.Load()}
	}
	defer resp.Body.Close()
	r := reply{status: resp.StatusCode, after: resp.Header.Get("Retry-After"), dropped: resp.Header.Get(droppedHeader), written: true}
	r.err = p.read(resp.Body, 0, most)
	return r
}

// droppedHeader tells why a gateway of llm-d has refused a request.
const droppedHeader = "X-Llm-D-Request-Dropped-Reason"

// read reads an answer of about so many bytes, up to most of them.
func (p *post) read(from io.Reader, about, most int) error {
	p.answer = slices.Grow(p.answer[:0], readRoom+about)
	for len(p.answer) < most {
		if cap(p.answer)-len(p.answer) < readRoom/2 {
			p.answer = slices.Grow(p.answer, len(p.answer))
		}
		n, err := from.Read(p.answer[len(p.answer):min(cap(p.answer), most)])
		p.answer = p.answer[:len(p.answer)+n]
		if err == io.EOF {
			return nil
		} else if err != nil {
			return err
		}
	}
	return nil
}
