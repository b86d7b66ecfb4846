package main

import (
	"bytes"
	"errors"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"
)

// asCommand in the environment makes this test binary run as spillway itself, so that tests
// start real processes, built once and under the race detector if the tests are.
const asCommand = "RUN_AS_SPILLWAY=1"

func TestMain(m *testing.M) {
	if name, value, _ := strings.Cut(asCommand, "="); os.Getenv(name) == value {
		main()
	}
	if order := os.Getenv(asGuests); order != "" {
		beGuests(order)
	}
	if worker := os.Getenv(asBare); worker != "" {
		beBare(worker)
	}
	os.Exit(m.Run())
}

// patience bounds each wait for a process; it is generous, because machines that run tests are
// slow, and is used up only by a failing test.
const patience = time.Minute

// running is one process of spillway.
type running struct {
	t      *testing.T
	cmd    *exec.Cmd
	stdout output
	stderr output
	exited chan struct{} // closed when the process has ended
}

// output collects what a process writes. It is safe for concurrent use.
type output struct {
	mu  sync.Mutex
	buf bytes.Buffer
}

// Write implements io.Writer.
func (o *output) Write(b []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.Write(b)
}

// String is what came so far.
func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.buf.String()
}

// start runs spillway with args, and with env beside an environment free of our own variables.
// When the test ends, the process is killed if it is still there.
func start(t *testing.T, env []string, args ...string) *running {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	return launch(t, exec.Command(self, args...), append(env, asCommand))
}

// launch is start for any command; env is all it is told to be.
func launch(t *testing.T, cmd *exec.Cmd, env []string) *running {
	t.Helper()
	p := &running{t: t, cmd: cmd, exited: make(chan struct{})}
	for _, v := range os.Environ() {
		if !strings.HasPrefix(v, "SPILLWAY_") && !strings.HasPrefix(v, "DYN_") {
			p.cmd.Env = append(p.cmd.Env, v)
		}
	}
	p.cmd.Env = append(p.cmd.Env, env...)
	p.cmd.Stdout, p.cmd.Stderr = &p.stdout, &p.stderr
	p.cmd.WaitDelay = time.Second
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	go func() {
		defer close(p.exited)
		var exit *exec.ExitError
		if err := p.cmd.Wait(); err != nil && !errors.As(err, &exit) {
			_, _ = io.WriteString(&p.stderr, "wait: "+err.Error())
		}
	}()
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // an error means that it has ended
		<-p.exited
		if t.Failed() {
			t.Logf("%s\nstdout:\n%s\nstderr:\n%s", strings.Join(append([]string{"spillway"}, cmd.Args[1:]...), " "), &p.stdout, &p.stderr)
		}
	})
	return p
}

// await waits until standard output matches and returns the first group of the match.
func (p *running) await(pattern string) string {
	p.t.Helper()
	return p.awaitIn(&p.stdout, pattern)
}

// awaitIn is await for one of the outputs.
func (p *running) awaitIn(out *output, pattern string) string {
	p.t.Helper()
	re := regexp.MustCompile(pattern)
	deadline := time.After(patience)
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for {
		if m := re.FindStringSubmatch(out.String()); m != nil {
			return m[1]
		}
		select {
		case <-tick.C:
		case <-p.exited:
			p.t.Fatalf("exit code %d before output matched %s", p.cmd.ProcessState.ExitCode(), pattern)
		case <-deadline:
			p.t.Fatalf("no output matched %s within %v", pattern, patience)
		}
	}
}

// signal sends a signal to the process.
func (p *running) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatalf("signal: %v", err)
	}
}

// exit waits for the end of the process and returns its exit code.
func (p *running) exit() int {
	p.t.Helper()
	select {
	case <-p.exited:
	case <-time.After(patience):
		p.t.Fatalf("still running after %v", patience)
	}
	return p.cmd.ProcessState.ExitCode()
}
