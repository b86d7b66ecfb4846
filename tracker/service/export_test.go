package service

// Decode reads a body of /add. It returns the status of the answer that a failure makes, 0 for
// none, and the bytes that were read.
func Decode(body []byte) (status, read int) {
	d := decoder{b: body}
	var r request
	if failed := d.body(addBody, &r); failed != nil {
		return failed.Status, d.i
	}
	return 0, d.i
}
