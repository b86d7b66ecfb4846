package replay

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"strconv"
	"syscall"
	"time"
)

// clockTicks is the unit of times in /proc, 1/100 s on every Linux that Go runs on.
const clockTicks = 100

// cpuMeter measures the CPU time that processes and this one use between start and stop.
type cpuMeter struct {
	pids   []int
	before []time.Duration // by index in pids
	own    time.Duration
	began  time.Time // zero before start
}

// cpuUse is what a cpuMeter measured.
type cpuUse struct {
	wall    time.Duration
	own     time.Duration
	pids    map[int]time.Duration // those that could be read to the end
	missing []int                 // those that could not
}

// newCPUMeter returns an error if one of pids cannot be read. This process is left out of them.
func newCPUMeter(pids []string) (*cpuMeter, error) {
	m := &cpuMeter{}
	for _, s := range pids {
		pid, err := strconv.Atoi(s)
		if err != nil {
			return nil, fmt.Errorf("replay: pids: %w", err)
		}
		if _, err := processCPU(pid); err != nil {
			return nil, fmt.Errorf("replay: pids: CPU time of process %d: %w", pid, err)
		}
		if pid != os.Getpid() {
			m.pids = append(m.pids, pid)
		}
	}
	return m, nil
}

func (m *cpuMeter) start(now time.Time) {
	m.began, m.own = now, ownCPU()
	m.before = make([]time.Duration, len(m.pids))
	for i, pid := range m.pids {
		used, err := processCPU(pid)
		if err != nil {
			used = -1 // gone already: stop will not find it either
		}
		m.before[i] = used
	}
}

func (m *cpuMeter) stop() cpuUse {
	use := cpuUse{pids: map[int]time.Duration{}}
	if m.began.IsZero() {
		return use
	}
	use.wall, use.own = time.Since(m.began), ownCPU()-m.own
	for i, pid := range m.pids {
		used, err := processCPU(pid)
		if err != nil || m.before[i] < 0 {
			use.missing = append(use.missing, pid)
			continue
		}
		use.pids[pid] = used - m.before[i]
	}
	return use
}

// ownCPU returns the CPU time that this process has used.
func ownCPU() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0 // cannot fail with these arguments
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// processCPU returns the CPU time, user and system, that a process has used, from /proc.
func processCPU(pid int) (time.Duration, error) {
	stat, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return 0, err
	}
	// The name, in parentheses, may hold anything; utime and stime are 12th and 13th after it.
	end := bytes.LastIndexByte(stat, ')')
	fields := bytes.Fields(stat[end+1:])
	if end < 0 || len(fields) < 13 {
		return 0, errors.New("/proc stat line is too short")
	}
	user, err1 := strconv.ParseInt(string(fields[11]), 10, 64)
	system, err2 := strconv.ParseInt(string(fields[12]), 10, 64)
	if err := errors.Join(err1, err2); err != nil {
		return 0, err
	}
	return time.Duration(user+system) * (time.Second / clockTicks), nil
}
