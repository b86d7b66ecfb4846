package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"
)

// asGuests in the environment makes this test binary run as a crowd of misbehaving clients; its
// value is an order.
const asGuests = "RUN_AS_GUESTS"

// order says who the guests are. What came of them is printed as a guestBook.
type order struct {
	Manner string
	Addr   string // of the front end; "" has them visit a server in their own process, which forgets all it reads
}

// guestBook is what a crowd reports.
type guestBook struct {
	Visits int
	Odd    []string // what went otherwise than it should, the first few
}

// favour is how much less of a contended processor guests get than the rest, as of nice. They have
// no real-time priority even if the rest has: the kernel stops such processes for 50 ms in a second
// that they fill, and lets each run for 100 ms while its equals wait.
const favour = 10

// invite has guests come again and again until ctx ends. When the last has left, how many came is
// sent. On return they are there.
func invite(ctx context.Context, t *testing.T, m manner, addr string) <-chan int {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	told, err := json.Marshal(order{m.name, addr})
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("chrt", "--other", "0", "nice", "-n", strconv.Itoa(favour), self)
	door, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	crowd := launch(t, cmd, []string{asGuests + "=" + string(told)})
	crowd.await(`(there)\n`)
	left := make(chan int, 1)
	go func() {
		<-ctx.Done()
		_ = door.Close() // an error means that they have gone by themselves
		<-crowd.exited
		var book guestBook
		_, report, _ := strings.Cut(crowd.stdout.String(), "\n")
		if err := json.Unmarshal([]byte(report), &book); err != nil {
			t.Errorf("the guests left without a word: %q: %v", report, err)
		}
		for _, odd := range book.Odd {
			t.Errorf("a guest: %s", odd)
		}
		left <- book.Visits
	}()
	return left
}

// beGuests carries out an order until standard input ends, and ends the process.
func beGuests(text string) {
	book, err := entertain(text)
	if err == nil {
		err = json.NewEncoder(os.Stdout).Encode(book)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func entertain(text string) (guestBook, error) {
	var o order
	if err := json.Unmarshal([]byte(text), &o); err != nil {
		return guestBook{}, err
	}
	ctx, end := context.WithCancel(context.Background())
	defer end()
	go func() {
		defer end()
		_, _ = io.Copy(io.Discard, os.Stdin)
	}()
	if o.Addr == "" {
		addr, err := forgetful(ctx)
		if err != nil {
			return guestBook{}, err
		}
		o.Addr = addr
	}
	for _, m := range measuredManners() {
		if m.name != o.Manner {
			continue
		}
		if m.visit == nil {
			idle, err := gather(ctx, o.Addr, m.many, false)
			defer idle.disperse()
			if err != nil {
				return guestBook{}, err
			}
			fmt.Println("there")
			<-ctx.Done()
			return guestBook{Visits: m.many}, nil
		}
		fmt.Println("there")
		return come(ctx, m, o.Addr), nil
	}
	return guestBook{}, fmt.Errorf("nobody has the manner %q", o.Manner)
}

// come has guests of one manner come again and again until ctx ends.
func come(ctx context.Context, m manner, addr string) (book guestBook) {
	var mu sync.Mutex
	var all sync.WaitGroup
	for range m.many {
		all.Go(func() {
			for ctx.Err() == nil {
				err := m.visit(ctx, addr, "guests")
				mu.Lock()
				book.Visits++
				if err != nil && ctx.Err() == nil && len(book.Odd) < 3 {
					book.Odd = append(book.Odd, err.Error())
				}
				mu.Unlock()
				pause(ctx, 100*time.Millisecond) // what is measured is the manner, not how fast loopback is
			}
		})
	}
	all.Wait()
	return book
}

// forgetful serves until ctx ends as little as a server can of a flood: it reads up to the limit,
// keeps nothing, and says what the front end would.
func forgetful(ctx context.Context) (addr string, err error) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	srv := &http.Server{ReadHeaderTimeout: patience, Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, err := io.Copy(io.Discard, http.MaxBytesReader(w, r.Body, 45<<20))
		if large := (*http.MaxBytesError)(nil); errors.As(err, &large) {
			http.Error(w, "body-limit-mb", http.StatusRequestEntityTooLarge)
		}
	})}
	go func() { _ = srv.Serve(ln) }()
	context.AfterFunc(ctx, func() { _ = srv.Close() })
	return ln.Addr().String(), nil
}
