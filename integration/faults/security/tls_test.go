package security

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// authority signs certificates.
type authority struct {
	cert *x509.Certificate
	key  *ecdsa.PrivateKey
	pem  []byte
}

func newAuthority(t *testing.T, name string) *authority {
	t.Helper()
	a := new(authority)
	template := &x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IsCA: true, BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign,
	}
	a.cert, a.key, a.pem = a.sign(t, template)
	return a
}

// sign makes a certificate of a new key, valid for an hour; an authority without a certificate signs its own.
func (a *authority) sign(t *testing.T, template *x509.Certificate) (*x509.Certificate, *ecdsa.PrivateKey, []byte) {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	require.NoError(t, err)
	serial, err := rand.Int(rand.Reader, big.NewInt(1<<62))
	require.NoError(t, err)
	template.SerialNumber = serial
	template.NotBefore, template.NotAfter = time.Now().Add(-time.Hour), time.Now().Add(time.Hour)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
	require.NoError(t, err)
	cert, err := x509.ParseCertificate(der)
	require.NoError(t, err)
	return cert, key, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})
}

// leaf is a certificate for a server on 127.0.0.1, or for a client.
func (a *authority) leaf(t *testing.T, usage x509.ExtKeyUsage) (cert, key []byte) {
	t.Helper()
	_, private, cert := a.sign(t, &x509.Certificate{
		Subject: pkix.Name{CommonName: "leaf"}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{usage}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
	})
	der, err := x509.MarshalPKCS8PrivateKey(private)
	require.NoError(t, err)
	return cert, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})
}

// trust is the configuration of a client that knows this authority and no other.
func (a *authority) trust() *tls.Config {
	roots := x509.NewCertPool()
	roots.AddCert(a.cert)
	return &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}
}

// withTLS lets a server listen for TLS on another port, and returns its address. clients: "yes" if they must have a certificate.
func (a *authority) withTLS(t *testing.T, server *redistest.Server, clients string) (addr string) {
	t.Helper()
	dir := t.TempDir()
	write := func(name string, text []byte) string {
		path := filepath.Join(dir, name)
		require.NoError(t, os.WriteFile(path, text, 0o600))
		return path
	}
	cert, key := a.leaf(t, x509.ExtKeyUsageServerAuth)
	admin, ctx := server.Client(t), context.Background()
	require.NoError(t, admin.Do(ctx, "CONFIG", "SET", "tls-cert-file", write("cert", cert), "tls-key-file", write("key", key),
		"tls-ca-cert-file", write("ca", a.pem), "tls-auth-clients", clients).Err())
	require.NoError(t, redistest.Poll(patience, func() error { // another program may take the port
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return err
		}
		addr = l.Addr().String()
		port := l.Addr().(*net.TCPAddr).Port
		_ = l.Close()
		return admin.ConfigSet(ctx, "tls-port", strconv.Itoa(port)).Err()
	}))
	return addr
}

// cutOff matches the errors of a server that hangs up. TLS 1.3 lets a client write before the server has checked its certificate, so the
// reason may be lost.
const cutOff = "EOF|connection reset|broken pipe"

// Everything works over TLS, with a certificate of the client's where the server wants one. The wrong certificate, or none, is an
// error that says so and not more.
func TestTLS(t *testing.T) {
	t.Parallel()
	ours, other := newAuthority(t, "ours"), newAuthority(t, "other")
	cert, key := ours.leaf(t, x509.ExtKeyUsageClientAuth)
	own, err := tls.X509KeyPair(cert, key)
	require.NoError(t, err)
	cert, key = other.leaf(t, x509.ExtKeyUsageClientAuth)
	foreign, err := tls.X509KeyPair(cert, key)
	require.NoError(t, err)

	known := ours.trust()
	mutual := ours.trust()
	mutual.Certificates = []tls.Certificate{own}
	stranger := ours.trust()
	stranger.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &foreign, nil }
	elsewhere := ours.trust()
	elsewhere.ServerName = "redis.example"

	for _, c := range []struct {
		name, clients string
		config        *tls.Config
		says          string // in the error; "" if it works
	}{
		{"server's certificate", "no", known, ""},
		{"mutual", "yes", mutual, ""},
		{"another authority", "no", other.trust(), "certificate signed by unknown authority"},
		{"another name", "no", elsewhere, "wanted to match redis.example"},
		{"client without a certificate", "yes", known, "certificate required|" + cutOff},
		{"client of another authority", "yes", stranger, "unknown certificate authority|" + cutOff},
		{"no TLS", "yes", nil, cutOff},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			server := redistest.Start(t)
			admin := server.Client(t)
			addr := ours.withTLS(t, server, c.clients)
			require.NoError(t, admin.ACLSetUser(context.Background(), "user", "on", ">"+secret, "allkeys", "allchannels", "+@all").Err())
			open := func() *redis.Client {
				return server.Client(t, func(o *redis.Options) {
					o.Addr, o.Username, o.Password, o.TLSConfig = addr, "user", secret, c.config
				})
			}
			if c.says == "" {
				works(t, open(), admin)
				return
			}
			for part, err := range failures(t, open, patience) {
				require.Error(t, err, part)
				require.NotContains(t, err.Error(), secret, part)
				require.Regexp(t, c.says, err.Error(), part)
			}
		})
	}
}
