package service

import "spillway/jsonhttp"

// Decode reads a body of /add. It returns the status of the answer that a failure makes, 0 for
// none, and the bytes that were read.
func Decode(body []byte) (status, read int) {
	var d jsonhttp.Decoder
	d.Reset(body)
	var r request
	if failed := jsonhttp.Object(&d, addBody, &r); failed != nil {
		return failed.Status, d.Read()
	}
	return 0, d.Read()
}
