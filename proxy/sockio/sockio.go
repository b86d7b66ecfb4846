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
