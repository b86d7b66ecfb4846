package main

import (
	"bufio"
	"bytes"
	"fmt"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	"spillway/worker"
)

// What all clients of a lifecycle share, and what each has of its own.
const (
	fewWorkers = 8
	fewRanks   = 4
	ownRanks   = 2
	maxHeld    = 30
	connCalls  = 20 // at most, of one connection
	cutOf      = 10 // connections one is cut
)

// site is a partition whose workers stay.
type site struct {
	worker.Partition
	workers, ranks int
}

// sites are one where prompts crowd on few ranks, and a fleet.
func sites(fleet int) []site {
	return []site{{worker.Partition{Model: "m", Tenant: "default"}, fewWorkers, fewRanks}, {worker.Partition{Model: "m", Tenant: "other"}, fleet, 8}}
}

// What became of a call whose connection was cut, in place of a status.
const (
	unsent  = -1 // the server has not had all of it
	unheard = 0  // it may have
)

// trackerConn is a connection to a slot tracker.
type trackerConn struct {
	t    testing.TB
	conn net.Conn
	in   *bufio.Reader
}

func dialTracker(t testing.TB, addr string) *trackerConn {
	t.Helper()
	conn, err := net.Dial("tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	return &trackerConn{t, conn, bufio.NewReaderSize(conn, 1024)}
}

func (c *trackerConn) close() { _ = c.conn.Close() }

// head is the head of a request, for a body of that size.
func head(method, path string, size int) string {
	return fmt.Sprintf("%s %s HTTP/1.1\r\nHost: t\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n", method, path, size)
}

// do makes one call. A call that fails fails the test, and its status is -1.
func (c *trackerConn) do(method, path, body string) (status int, answer []byte) {
	_, err := io.WriteString(c.conn, head(method, path, len(body))+body)
	var res *http.Response
	if err == nil {
		res, err = http.ReadResponse(c.in, nil)
	}
	if err == nil {
		answer, err = io.ReadAll(res.Body)
	}
	if err != nil {
		c.t.Errorf("%s %s %s: %v", method, path, body, err)
		return unsent, nil
	}
	return res.StatusCode, answer
}

// tallies count what clients did.
type tallies struct{ calls, conns, unsent, unheard, adds, expired, maybe, asked int }

func (n *tallies) plus(m tallies) {
	n.calls += m.calls
	n.conns += m.conns
	n.unsent += m.unsent
	n.unheard += m.unheard
	n.adds += m.adds
	n.expired += m.expired
	n.maybe += m.maybe
	n.asked += m.asked
}

// lifecycleClient makes random calls, one after another, and knows what it holds.
type lifecycleClient struct {
	*lifecycle
	tallies // expired: bookings found to be; maybe: those that were old when they ended otherwise; asked: for, at checkpoints
	index   int
	rng     *rand.Rand
	conn    *trackerConn // or nil
	rest    int          // calls to make before the checkpoint
	left    int          // of them, over conn
	cut     bool         // at the last of those
	names   int

	own        worker.Partition // where it has a worker of its own, which comes and goes
	registered bool
	doubtful   bool // whether it is

	held    []*promise // to be freed
	orphans []*promise // never to be freed
	doubts  []*promise // with a call that may have arrived
}

func newLifecycleClient(l *lifecycle, index int) *lifecycleClient {
	c := &lifecycleClient{lifecycle: l, index: index, rng: rand.New(rand.NewPCG(l.seed, uint64(index))), own: l.sites[0].Partition}
	if index%2 == 1 { // its books come and go with its worker
		c.own = worker.Partition{Model: fmt.Sprint("own-", index), Tenant: "default"}
	}
	return c
}

func (c *lifecycleClient) ownWorker() uint64 { return uint64(5001 + c.index) }

func (c *lifecycleClient) onOwn(p *promise) bool {
	return uint64(p.rank.Worker) == c.ownWorker() && p.partition == c.own
}

// live makes so many calls, after which it has hung up.
func (c *lifecycleClient) live(calls int) {
	for c.rest = calls; c.rest > 0 && !c.t.Failed(); {
		c.step()
	}
}

func (c *lifecycleClient) step() {
	p := c.pick()
	switch n := c.rng.IntN(100); {
	case n < 36 && len(c.held) < maxHeld || p == nil:
		c.add()
	case n < 50:
		c.call("/prefill_complete", p)
	case n < 76:
		c.call("/free", p)
	case n < 79: // forgets one
		c.drop(p)
		c.orphans = append(c.orphans, p)
		c.add()
	case n < 85:
		c.call("/output_block", p)
	case n < 88:
		c.again(p)
	case n < 90:
		c.toggle()
	case n < 95:
		c.read()
	default:
		c.mistake()
	}
}

// send makes one call, in the middle of which the connection may be cut.
func (c *lifecycleClient) send(method, path, body string) (status int, answer []byte) {
	c.calls++
	if c.conn == nil {
		c.conns++
		c.conn, c.left, c.cut = dialTracker(c.t, c.addr), 1+c.rng.IntN(min(connCalls, c.rest)), c.rng.IntN(cutOf) == 0
	}
	c.rest--
	c.left--
	if c.left > 0 {
		return c.conn.do(method, path, body)
	}
	defer func() { c.conn.close(); c.conn = nil }()
	if !c.cut {
		return c.conn.do(method, path, body)
	}
	body += strings.Repeat(" ", c.rng.IntN(8)) // so that a part may be whole JSON
	start := head(method, path, len(body))
	text := start + body
	if c.rng.IntN(2) == 0 {
		if tcp, ok := c.conn.conn.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // what is on its way is thrown away
		}
	}
	status = unsent
	switch n := c.rng.IntN(4); {
	case n == 0:
		text = text[:c.rng.IntN(len(start))]
	case n == 1 && body != "":
		text = text[:len(start)+c.rng.IntN(len(body))]
	default:
		status = unheard
	}
	if status == unsent {
		c.unsent++
	} else {
		c.unheard++
	}
	_, err := io.WriteString(c.conn.conn, text)
	if err == nil && status == unheard && c.rng.IntN(2) == 0 {
		_, err = c.conn.in.ReadByte() // not what it says
	}
	if err != nil {
		c.t.Errorf("%s %s %s: %v", method, path, body, err)
	}
	return status, nil
}

// wrong reports an answer that no state allows.
func (c *lifecycleClient) wrong(path, body string, status int, answer []byte) {
	c.t.Errorf("client %d: %s %s = %d %s", c.index, path, body, status, answer)
}

// old tells whether a booking may have expired by now.
func (c *lifecycleClient) old(p *promise) bool { return time.Since(p.sent) > c.expiry }

// pick returns one of the bookings that are held, and whose worker is not in doubt, or nil.
func (c *lifecycleClient) pick() *promise {
	if len(c.held) == 0 {
		return nil
	}
	if p := c.held[c.rng.IntN(len(c.held))]; !c.doubtful || !c.onOwn(p) {
		return p
	}
	return nil
}

func (c *lifecycleClient) drop(p *promise) {
	c.held = slices.DeleteFunc(c.held, func(o *promise) bool { return o == p })
}

// newPromise is one that has yet to be booked.
func (c *lifecycleClient) newPromise() *promise {
	c.names++
	at := c.sites[c.rng.IntN(len(c.sites))]
	p := &promise{
		id: fmt.Sprintf("c%d-%d", c.index, c.names), partition: at.Partition,
		rank: worker.Rank{Worker: worker.ID(c.rng.IntN(at.workers)), DP: c.rng.Uint32N(uint32(at.ranks))}, hashes: c.prompt(),
	}
	if c.registered && !c.doubtful && c.rng.IntN(5) == 0 {
		p.partition, p.rank = c.own, worker.Rank{Worker: worker.ID(c.ownWorker()), DP: c.rng.Uint32N(ownRanks)}
	}
	switch n := c.rng.IntN(200); {
	case n == 0:
		p.tokens = math.MaxUint64 - c.rng.Uint64N(3)
	case n < 180:
		p.tokens = c.rng.Uint64N(5000)
	}
	p.open = p.tokens > 0
	return p
}

// prompt shares a beginning with those of other clients, or has none.
func (c *lifecycleClient) prompt() []int64 {
	family := c.rng.Int64N(24)
	var all []int64
	for depth := range c.rng.Int64N(20) {
		all = append(all, (depth+1)*0x1e3779b97f4a7c15^family>>max(0, 4-depth))
	}
	for range c.rng.IntN(4) {
		all = append(all, int64(c.rng.Uint64()))
	}
	return all
}

func (c *lifecycleClient) add() {
	p := c.newPromise()
	p.sent = time.Now()
	switch status, answer := c.send("POST", "/add", p.add()); status {
	case 201:
		c.adds++
		c.held = append(c.held, p)
	case unheard:
		c.doubt(p, "/add")
	case unsent:
	default:
		c.wrong("/add", p.add(), status, answer)
	}
}

func (c *lifecycleClient) doubt(p *promise, path string) {
	c.drop(p)
	p.doubt = path
	c.doubts = append(c.doubts, p)
}

// call tells of an event of one booking.
func (c *lifecycleClient) call(path string, p *promise) {
	status, answer := c.send("POST", path, p.named())
	switch status {
	case unsent:
	case unheard:
		c.doubt(p, path)
	default:
		c.note(path, p, status, answer)
	}
}

// note takes in the answer to an event of a booking that was there, unless it had expired.
func (c *lifecycleClient) note(path string, p *promise, status int, answer []byte) {
	switch {
	case path == "/free" && status == 200:
		if c.old(p) {
			c.maybe++
		}
		c.drop(p)
	case path == "/prefill_complete" && status == 200:
		p.open = false
	case path == "/output_block" && status == 200:
		p.output++
	case status == 404 && c.old(p):
		c.tallies.expired++
		c.drop(p)
	default:
		c.wrong(path, p.named(), status, answer)
	}
}

// again adds a booking that is there already, with other contents.
func (c *lifecycleClient) again(p *promise) {
	q := c.newPromise()
	q.id, q.partition, q.rank, q.sent = p.id, p.partition, p.rank, time.Now()
	switch status, answer := c.send("POST", "/add", q.add()); {
	case status == 409, status == unsent:
	case status == unheard:
		c.doubt(p, "/free") // if p has expired by then q was booked
	case status == 201 && c.old(p):
		c.adds++
		c.tallies.expired++
		c.drop(p)
		c.held = append(c.held, q)
	default:
		c.wrong("/add", q.add(), status, answer)
	}
}

// toggle registers the client's own worker or takes it away with all that is booked on it, unless
// a call may be on its way that would have another outcome then.
func (c *lifecycleClient) toggle() {
	if c.doubtful || slices.ContainsFunc(c.doubts, c.onOwn) {
		c.read()
		return
	}
	path, want := "/register", 201
	if c.registered {
		path, want = "/unregister", 200
	}
	body := registration(c.own, c.ownWorker(), ownRanks)
	switch status, answer := c.send("POST", path, body); status {
	case want:
		c.become(!c.registered)
	case unheard:
		c.doubtful = true
	case unsent:
	default:
		c.wrong(path, body, status, answer)
	}
}

// become notes whether the client's own worker is registered.
func (c *lifecycleClient) become(registered bool) {
	if c.registered && !registered {
		gone := func(p *promise) bool {
			if c.onOwn(p) && c.old(p) {
				c.maybe++
			}
			return c.onOwn(p)
		}
		c.held = slices.DeleteFunc(c.held, gone)
		c.orphans = slices.DeleteFunc(c.orphans, gone)
	}
	c.registered, c.doubtful = registered, false
}

// read asks for what others change meanwhile. Few ask about the whole fleet.
func (c *lifecycleClient) read() {
	method, path, body := "GET", "/loads?tenant_id=default", ""
	switch n := c.rng.IntN(20); {
	case n == 0:
		path = "/workers"
	case n < 15:
		method, path, body = "POST", "/potential_loads", c.prospect(c.sites[max(2-n, 0)]).body()
	}
	status, answer := c.send(method, path, body)
	if status > 0 && (status != 200 || bytes.Count(answer, []byte(`"worker_id":`)) < fewWorkers) {
		c.wrong(path, body, status, answer)
	}
}

func (c *lifecycleClient) prospect(at site) prospect {
	return prospect{at.Partition, c.prompt(), c.rng.Uint64N(1000)}
}

// mistake is a call that must be refused or change nothing.
func (c *lifecycleClient) mistake() {
	p := c.newPromise()
	path, body, want := "/add", "", 404
	switch c.rng.IntN(9) {
	case 0:
		p.rank.DP = 100
		body = p.add()
	case 1:
		p.partition.Model = "unknown"
		body = p.add()
	case 2:
		path, body = "/prefill_complete", p.named()
	case 3:
		path, body, want = "/free", p.named(), 200
	case 4:
		body, want = strings.TrimSuffix(p.add(), "}"), 400
	case 5:
		body, want = strings.Replace(p.add(), "sequence_hashes", "Sequence_hashes", 1), 422
	case 6:
		path, body, want = "/register", registration(c.sites[0].Partition, 0, 1), 409
	case 7:
		path, body, want = "/register", strings.Replace(registration(c.sites[1].Partition, 5000, 1), ":16,", ":32,", 1), 409
	case 8:
		path, body = "/unregister", registration(c.sites[0].Partition, 5000, 1)
	}
	if status, answer := c.send("POST", path, body); status > 0 && status != want {
		c.wrong(path, body, status, answer)
	}
}
