package proxy_test

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"spillway/sim"
)

// asSim in the environment makes this test binary run one simulated worker instead of tests.
const asSim = "RUN_AS_SIM=1"

func TestMain(m *testing.M) {
	if name, value, _ := strings.Cut(asSim, "="); os.Getenv(name) == value {
		if err := runSim(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// runSim serves model m until standard input ends, as it does when the test process dies.
func runSim() error {
	cfg := sim.DefaultConfig()
	cfg.Port, cfg.Model = 0, "m"
	workers, err := sim.New(cfg, slog.New(slog.DiscardHandler))
	if err != nil {
		return err
	}
	lns, err := sim.Listen(cfg)
	if err != nil {
		return err
	}
	fmt.Println(lns[0].Addr())
	ctx, stop := context.WithCancel(context.Background())
	go func() {
		_, _ = io.Copy(io.Discard, os.Stdin)
		stop()
	}()
	return workers.Run(ctx, lns)
}

// simProcess is a simulated worker in a process of its own, which can be stopped.
type simProcess struct {
	t    *testing.T
	cmd  *exec.Cmd
	addr string
}

// newSimProcess runs a worker of model m until the test ends.
func newSimProcess(t *testing.T) *simProcess {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	p := &simProcess{t: t, cmd: exec.Command(self)}
	p.cmd.Env = append(os.Environ(), asSim)
	p.cmd.Stderr = os.Stderr
	if _, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	out, err := p.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = p.cmd.Process.Kill() // an error means that it has ended
		_ = p.cmd.Wait()         // that it was killed
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	if err != nil {
		t.Fatalf("the worker has not begun: %v", err)
	}
	p.addr = strings.TrimSpace(line)
	return p
}

func (p *simProcess) url() string { return "http://" + p.addr }

// stop halts the process until resume. When it returns, no thread of the process runs any more.
func (p *simProcess) stop() {
	p.t.Helper()
	p.signal(syscall.SIGSTOP)
	var status syscall.WaitStatus
	for {
		_, err := syscall.Wait4(p.cmd.Process.Pid, &status, syscall.WUNTRACED, nil)
		switch {
		case err == syscall.EINTR: //nolint:errorlint // system calls return it as it is
		case err != nil || !status.Stopped():
			p.t.Fatalf("the process has not stopped: %#x, %v", status, err)
		default:
			return
		}
	}
}

func (p *simProcess) resume() {
	p.t.Helper()
	p.signal(syscall.SIGCONT)
}

func (p *simProcess) signal(s syscall.Signal) {
	p.t.Helper()
	if err := p.cmd.Process.Signal(s); err != nil {
		p.t.Fatalf("signal %v: %v", s, err)
	}
}

// stats waits until GET /sim/stats tells all of the given figures, each as `"name":value`.
func (p *simProcess) stats(figures ...string) {
	p.t.Helper()
	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	eventually(p.t, "the simulated worker tells "+strings.Join(figures, " "), func() bool {
		resp, err := client.Get(p.url() + "/sim/stats")
		if err != nil {
			return false
		}
		defer resp.Body.Close()
		page, err := io.ReadAll(resp.Body)
		all, _, _ := strings.Cut(string(page), `"workers"`) // the sums come first
		for _, figure := range figures {
			if err != nil || !strings.Contains(all, figure+",") {
				return false
			}
		}
		return true
	})
}

// connected counts the connections to the worker that this process has open, by the kernel's
// table: a worker that is stopped cannot tell. Without such a table it is 0.
func (p *simProcess) connected() (n int) {
	p.t.Helper()
	table, err := os.ReadFile("/proc/net/tcp")
	if err != nil {
		return 0
	}
	tcp, err := net.ResolveTCPAddr("tcp", p.addr)
	if err != nil {
		p.t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		const remote, inode = 2, 9 // columns; what nobody has open any more has no inode
		f := strings.Fields(line)
		if len(f) > inode && strings.HasSuffix(f[remote], fmt.Sprintf(":%04X", tcp.Port)) && f[inode] != "0" {
			n++
		}
	}
	return n
}
