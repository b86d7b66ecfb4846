// Package sockio makes single read and write calls on non-blocking sockets, inside the functions that
// are handed to a syscall.RawConn, without telling the scheduler.
//
// Go's own calls tell it, so that another thread can take over if they block. These do not block, and
// telling has a price where a process is idle between two requests: the first call after each pause
// wakes the runtime's monitor thread, which then looks every 20 us whether the call has ended. That
// was a futex call, two or three naps and as many context switches for every request or event.
//
// Errors are bare errno values, EAGAIN and EINTR among them.
package sockio

import "syscall"

// Ended tells whether the other side has ended a connection, and all that it had sent has been read.
// It takes nothing from the socket.
func Ended(fd uintptr) bool {
	var b [1]byte
	n, _, err := syscall.Recvfrom(int(fd), b[:], syscall.MSG_PEEK)
	return n == 0 && err == nil || err != nil && err != syscall.EAGAIN && err != syscall.EINTR
}
