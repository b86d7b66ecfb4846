package jsonhttp

import "spillway/httperr"

// skip passes over a value that means nothing to us. It may be nested to any depth, so what is
// open is kept in a list: true for an object.
func (d *Decoder) skip() *httperr.Error {
	var open []bool
	for {
		c := d.peek()
		switch {
		case c == '{' || c == '[':
			d.i++
			object := c == '{'
			if next := d.peek(); next == closing(object) {
				d.i++
				break
			}
			open = append(open, object)
			if err := d.name(object); err != nil {
				return err
			}
			continue
		case c == '"':
			if err := d.skipText(); err != nil {
				return err
			}
		case c == '-' || c >= '0' && c <= '9':
			if _, _, err := d.digits(); err != nil {
				return err
			}
		default:
			if _, err := d.word(); err != nil {
				return err
			}
		}
		more, err := d.close(&open)
		if err != nil || !more {
			return err
		}
	}
}

func closing(object bool) byte {
	if object {
		return '}'
	}
	return ']'
}

// close ends what ends after a value. It tells whether another value comes.
func (d *Decoder) close(open *[]bool) (more bool, err *httperr.Error) {
	for len(*open) > 0 {
		object := (*open)[len(*open)-1]
		switch d.peek() {
		case ',':
			d.i++
			return true, d.name(object)
		case closing(object):
			d.i++
			*open = (*open)[:len(*open)-1]
		default:
			return false, d.notJSON("a comma or a closing bracket is missing")
		}
	}
	return false, nil
}

// name reads the name of a member, in an object.
func (d *Decoder) name(object bool) *httperr.Error {
	if !object {
		return nil
	}
	if d.peek() != '"' {
		return d.notJSON("a field name is missing")
	}
	if err := d.skipText(); err != nil {
		return err
	}
	if d.peek() != ':' {
		return d.notJSON("a colon is missing")
	}
	d.i++
	return nil
}

// skipText passes over a string, whatever characters its bytes and escapes make.
func (d *Decoder) skipText() *httperr.Error {
	d.i++
	for d.i < len(d.b) {
		switch c := d.b[d.i]; {
		case c == '"':
			d.i++
			return nil
		case c == '\\':
			if _, _, err := d.unit(); err != nil {
				return err
			}
		case c < ' ':
			return d.notJSON("a control character in a string")
		default:
			d.i++
		}
	}
	return d.notJSON("a string does not end")
}
