//go:build !linux || race

package sockio

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// Read is one read(2); 0 bytes without an error are the end.
func Read(fd uintptr, p []byte) (int, error) { return syscall.Read(int(fd), p) }

// Write is one write(2).
func Write(fd uintptr, p []byte) (int, error) { return syscall.Write(int(fd), p) }

// Writev is one writev(2) of head and body.
func Writev(fd uintptr, head, body []byte) (int, error) {
	return unix.Writev(int(fd), [][]byte{head, body})
}
