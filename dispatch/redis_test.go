package dispatch_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
)

// patience bounds each wait; it is used up only by a failing test.
const patience = time.Minute

func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !ok(); time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

// server is a real Redis that writes what it is told to a file before it says so.
type server struct {
	t    testing.TB
	port int
	args []string
	cmd  *exec.Cmd
	out  bytes.Buffer
	*redis.Client
}

func startRedis(t testing.TB, args ...string) *server {
	t.Helper()
	path, err := exec.LookPath("redis-server")
	if err != nil {
		if path, err = filepath.Abs("../bin/tools/redis-server"); err == nil {
			_, err = os.Stat(path)
		}
	}
	if err != nil {
		const how = "redis-server is neither in the PATH nor in bin/tools; `make setup-test` puts it there"
		if os.Getenv("REQUIRE_REDIS") != "" {
			t.Fatal(how)
		}
		t.Skip(how)
	}
	s := &server{t: t, port: unusedPort(t)}
	s.args = append([]string{path, "--port", strconv.Itoa(s.port), "--bind", "127.0.0.1", "--dir", t.TempDir(), "--save", "", "--appendonly", "yes", "--appendfsync", "always"}, args...)
	s.Client = redis.NewClient(&redis.Options{Addr: s.addr(), MaxRetries: -1, ContextTimeoutEnabled: true})
	t.Cleanup(func() {
		_ = s.Client.Close()
		s.kill()
		if t.Failed() {
			t.Logf("redis-server:\n%s", &s.out)
		}
	})
	s.start()
	return s
}

// unusedPort is one that nobody listened on a moment ago, and that the system gives to nobody who lets
// it choose, also while the server is down: those are from 32768 on. A node of a cluster has also the
// one that is 10000 above.
func unusedPort(t testing.TB) int {
	t.Helper()
	for range 1000 {
		port := 12000 + rand.IntN(10000)
		if ln, err := net.Listen("tcp", fmt.Sprintf("127.0.0.1:%d", port)); err == nil {
			_ = ln.Close() // taken over by the server
			return port
		}
	}
	t.Fatal("no port is free")
	return 0
}

// dir is where its files are.
func (s *server) dir() string { return s.args[slices.Index(s.args, "--dir")+1] }

func (s *server) addr() string { return fmt.Sprintf("127.0.0.1:%d", s.port) }
func (s *server) url() string  { return "redis://" + s.addr() + "/0" }

// start runs the server, with what an earlier one has written.
func (s *server) start() {
	s.t.Helper()
	s.cmd = exec.Command(s.args[0], s.args[1:]...)
	s.cmd.Stdout, s.cmd.Stderr = &s.out, &s.out
	if err := s.cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	eventually(s.t, "Redis answers", func() bool {
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		return s.Ping(ctx).Err() == nil
	})
}

// kill ends it without a word.
func (s *server) kill() {
	if s.cmd.Process == nil {
		return // it could not be started
	}
	_ = s.cmd.Process.Kill() // an error means that it has ended
	_ = s.cmd.Wait()
}

func writeFile(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
