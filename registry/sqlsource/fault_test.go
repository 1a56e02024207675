package sqlsource

import (
	"errors"
	"fmt"
	"testing"

	"github.com/stretchr/testify/require"
)

// What drivers' errors look like.
type (
	mysqlError  struct{ Number uint16 }
	stateError  string
	codeError   int
	errNo       int
	mattnError  struct{ Code errNo }
	plainStruct struct{ Number string }
)

func (e *mysqlError) Error() string   { return fmt.Sprint("Error ", e.Number) }
func (e stateError) Error() string    { return string(e) }
func (e stateError) SQLState() string { return string(e) }
func (e codeError) Error() string     { return "sqlite" }
func (e codeError) Code() int         { return int(e) }
func (e mattnError) Error() string    { return "sqlite" }
func (e plainStruct) Error() string   { return "plain" }

func TestFaultOf(t *testing.T) {
	for want, errs := range map[Fault][]error{
		Denied:   {&mysqlError{1142}, stateError("42501"), codeError(23), mattnError{23}},
		ReadOnly: {&mysqlError{1290}, stateError("25006"), codeError(8 | 3<<8), mattnError{8}},
		NoTable:  {&mysqlError{1146}, stateError("42P01")},
		BadValue: {&mysqlError{1406}, stateError("22003"), stateError("23505"), codeError(19 | 8<<8), mattnError{19}},
		Locked:   {&mysqlError{1205}, stateError("55P03"), codeError(5), mattnError{6}},
		NoColumn: {&mysqlError{1054}},
		Unknown:  {nil, &mysqlError{1213}, stateError("40001"), stateError(""), codeError(1), mattnError{1}, plainStruct{"8"}, errors.New("8")},
	} {
		for _, err := range errs {
			require.Equal(t, want, FaultOf(err), "%#v", err)
			if err != nil {
				require.Equal(t, want, FaultOf(fmt.Errorf("twice: %w", fmt.Errorf("wrapped: %w", err))))
			}
		}
	}
}
