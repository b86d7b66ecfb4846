package replay

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"math"
	"math/rand/v2"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Streams of chance, one for each use, so that switching one use on does not change another.
const (
	chanceSpread = iota + 1
	chanceGaps
	chanceLeave
	chancePrompt
)

// Schedule returns what a run of cfg will send, in order, At being real time since the start of
// the run. It reads the trace file if there is one. The same cfg gives the same schedule.
//
// A trace is cut first (--skip, then --first, counted from the trace's first arrival), then spread,
// then cut to --requests, then set to real time by the speed.
func Schedule(cfg Config) ([]Request, error) {
	profile, err := parseProfile(cfg.SpeedProfile)
	if err != nil {
		return nil, fmt.Errorf("replay: speed-profile: %w", err)
	}
	profile.speed = cfg.Speed
	var reqs []Request
	if cfg.TracePath != "" {
		if reqs, err = readFile(cfg); err != nil {
			return nil, err
		}
	} else {
		reqs = fixedLoad(cfg)
	}
	reqs = cut(reqs, cfg.Skip, cfg.First)
	seedPrompts(reqs, cfg.Seed)
	spread(reqs, cfg.Spread, cfg.Seed)
	if cfg.Requests > 0 && len(reqs) > cfg.Requests {
		reqs = reqs[:cfg.Requests]
	}
	if len(reqs) == 0 {
		return nil, errors.New("replay: no arrival is left to send; check --skip, --first, --rate and --duration")
	}
	for i := range reqs {
		reqs[i].At = profile.realTime(reqs[i].At)
	}
	chooseLeavers(reqs, cfg)
	return reqs, nil
}

func readFile(cfg Config) ([]Request, error) {
	f, err := os.Open(cfg.TracePath)
	if err != nil {
		return nil, fmt.Errorf("replay: open trace: %w", err)
	}
	defer f.Close()
	reqs, err := ReadTrace(f, cfg.Format)
	if err != nil {
		return nil, fmt.Errorf("%w (in %s)", err, cfg.TracePath)
	}
	return reqs, nil
}

// fixedLoad returns cfg.Requests arrivals, or those of cfg.Duration. Even ones begin at 0.
func fixedLoad(cfg Config) []Request {
	gap := 1 / cfg.Rate // seconds
	chance := rand.New(rand.NewPCG(cfg.Seed, chanceGaps))
	var reqs []Request
	at := 0.0
	if cfg.Poisson {
		at = chance.ExpFloat64() * gap
	}
	for len(reqs) < maxRequests {
		if cfg.Requests > 0 && len(reqs) == cfg.Requests || cfg.Requests == 0 && at >= cfg.Duration.Seconds() {
			break
		}
		reqs = append(reqs, Request{
			At: time.Duration(at * float64(time.Second)), ISLTokens: cfg.ISLTokens, OSLTokens: cfg.OSLTokens,
		})
		if cfg.Poisson {
			at += chance.ExpFloat64() * gap
		} else {
			at = float64(len(reqs)) * gap // not added up, so that rounding does not either
		}
	}
	return reqs
}

// cut leaves the arrivals in [skip, skip+first), with skip as the new 0. first 0 is no end.
func cut(reqs []Request, skip, first time.Duration) []Request {
	from, _ := slices.BinarySearchFunc(reqs, Request{At: skip}, byArrival)
	reqs = reqs[from:]
	for i := range reqs {
		reqs[i].At -= skip
	}
	if first > 0 {
		to, _ := slices.BinarySearchFunc(reqs, Request{At: first}, byArrival)
		reqs = reqs[:to]
	}
	return reqs
}

func seedPrompts(reqs []Request, seed uint64) {
	chance := rand.New(rand.NewPCG(seed, chancePrompt))
	for i := range reqs {
		if reqs[i].Blocks == nil {
			reqs[i].Unique = chance.Uint64()
		}
	}
}

func spread(reqs []Request, below time.Duration, seed uint64) {
	if below <= 0 {
		return
	}
	chance := rand.New(rand.NewPCG(seed, chanceSpread))
	for i := range reqs {
		reqs[i].At += time.Duration(chance.Int64N(int64(below)))
	}
	slices.SortStableFunc(reqs, byArrival)
}

func chooseLeavers(reqs []Request, cfg Config) {
	chance := rand.New(rand.NewPCG(cfg.Seed, chanceLeave))
	for i := range reqs {
		goes, after := chance.Float64() < cfg.Leave, chance.Float64()
		if goes {
			reqs[i].LeaveAfter = 1 + time.Duration(after*float64(cfg.LeaveAfter))
		}
	}
}

// ArrivalHash returns a hash in hex over the due time in milliseconds, lengths and block ids of all
// reqs, by which two runs can be seen to have sent the same.
func ArrivalHash(reqs []Request) string {
	sum := sha256.New()
	var buf []byte
	for i := range reqs {
		r := &reqs[i]
		blocks := blockCount(r.ISLTokens)
		buf = binary.LittleEndian.AppendUint64(buf[:0], uint64(r.At.Milliseconds()))
		buf = binary.LittleEndian.AppendUint64(buf, uint64(r.ISLTokens))
		buf = binary.LittleEndian.AppendUint64(buf, uint64(r.OSLTokens))
		for b := range blocks {
			buf = binary.LittleEndian.AppendUint64(buf, r.block(b))
		}
		sum.Write(buf)
	}
	return hex.EncodeToString(sum.Sum(nil)[:16])
}

// sineProfile is a speed that changes with real time t: speed x (1 + amplitude sin(2 pi t / period)).
// Without a period it is constant.
type sineProfile struct {
	speed     float64
	amplitude float64 // 0 to less than 1, so that time never stands still
	period    float64 // seconds
}

// parseProfile reads AMPLITUDE,PERIOD. Empty is a constant speed.
func parseProfile(s string) (sineProfile, error) {
	if s == "" {
		return sineProfile{speed: 1}, nil
	}
	amplitude, period, ok := strings.Cut(s, ",")
	if !ok {
		return sineProfile{}, fmt.Errorf("%q is not AMPLITUDE,PERIOD, as in 0.5,10m", s)
	}
	a, err := strconv.ParseFloat(strings.TrimSpace(amplitude), 64)
	if err != nil || !(a >= 0 && a < 1) {
		return sineProfile{}, fmt.Errorf("amplitude %q is not within 0..1, 1 excluded", amplitude)
	}
	p, err := time.ParseDuration(strings.TrimSpace(period))
	if err != nil || p <= 0 {
		return sineProfile{}, fmt.Errorf("period %q is not a duration above 0", period)
	}
	return sineProfile{speed: 1, amplitude: a, period: p.Seconds()}, nil
}

// realTime returns when trace time reaches at. Trace time is the integral of the speed,
// speed x (t + swing (1 - cos(2 pi t / period))), which only grows, so bisection finds it.
func (p sineProfile) realTime(at time.Duration) time.Duration {
	want := at.Seconds() / p.speed
	if p.amplitude == 0 {
		return time.Duration(want * float64(time.Second))
	}
	swing := p.amplitude * p.period / (2 * math.Pi)
	low, high := max(0, want-2*swing), want
	for range 64 {
		t := (low + high) / 2
		if t+swing*(1-math.Cos(2*math.Pi*t/p.period)) < want {
			low = t
		} else {
			high = t
		}
	}
	return time.Duration(high * float64(time.Second))
}
