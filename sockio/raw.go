//go:build linux && !race

package sockio

import (
	"syscall"
	"unsafe"
)

// Read is one read(2); 0 bytes without an error are the end.
func Read(fd uintptr, p []byte) (int, error) {
	return result(syscall.RawSyscall(syscall.SYS_READ, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p))))
}

// Write is one write(2).
func Write(fd uintptr, p []byte) (int, error) {
	return result(syscall.RawSyscall(syscall.SYS_WRITE, fd, uintptr(unsafe.Pointer(unsafe.SliceData(p))), uintptr(len(p))))
}

// Writev is one writev(2) of head and body.
func Writev(fd uintptr, head, body []byte) (int, error) {
	v := [2]syscall.Iovec{{Base: unsafe.SliceData(head)}, {Base: unsafe.SliceData(body)}}
	v[0].SetLen(len(head))
	v[1].SetLen(len(body))
	return result(syscall.RawSyscall(syscall.SYS_WRITEV, fd, uintptr(unsafe.Pointer(&v)), uintptr(len(v))))
}

func result(n, _ uintptr, errno syscall.Errno) (int, error) {
	if errno != 0 {
		return 0, errno
	}
	return int(n), nil
}
