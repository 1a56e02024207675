package security

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/go-tokenbucket/tokenbucket"
	"github.com/go-tokenbucket/tokenbucket/internal/redistest"
)

// documented returns the rights that docs/security.md gives to each user, so that the tests use the documented ones.
func documented(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("../../../docs/security.md")
	require.NoError(t, err)
	rights := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		words := strings.Fields(line)
		if len(words) > 6 && words[0] == "ACL" && words[1] == "SETUSER" && words[3] == "reset" {
			require.Equal(t, []string{"on", ">PASSWORD"}, words[4:6], words[2])
			rights[words[2]] = words[6:]
		}
	}
	return rights
}

// as returns a client of a user with these rights and no others, whose log of refusals is empty.
func as(t *testing.T, server *redistest.Server, admin *redis.Client, rights []string, change ...func(*redis.Options)) *redis.Client {
	t.Helper()
	ctx := context.Background()
	require.NoError(t, admin.Do(ctx, "ACL", "LOG", "RESET").Err())
	args := []any{"ACL", "SETUSER", "user", "reset", "on", ">" + secret}
	for _, r := range rights {
		args = append(args, r)
	}
	require.NoError(t, admin.Do(ctx, args...).Err())
	return server.Client(t, append(change, func(o *redis.Options) { o.Username, o.Password = "user", secret })...)
}

// Each user of docs/security.md can do everything that it is for, and Redis refuses nothing meanwhile. Without any one of its
// rights something fails.
func TestACL(t *testing.T) {
	users := documented(t)
	for name, operate := range map[string]func(*operator, context.Context) error{
		"script":    (*operator).script,
		"lock":      (*operator).lock,
		"semaphore": (*operator).semaphore,
		"window":    (*operator).window,
		"switch":    (*operator).flip,
		"publish":   (*operator).publish,
		"console":   (*operator).console,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			rights := users[name]
			require.NotEmpty(t, rights, "the document's line")
			server := redistest.Start(t)
			admin := server.Client(t)
			try := func(rights []string) (refused []string, err error) {
				ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
				defer cancel()
				user := as(t, server, admin, rights)
				o := &operator{client: user, admin: admin}
				o.relent = func() error {
					return admin.Do(context.Background(), "ACL", "SETUSER", "user", "allkeys", "allchannels", "+@all").Err()
				}
				require.NoError(t, o.fresh(ctx))
				ended := make(chan struct{})
				watching := make(chan struct{})
				go func() { // what goes on and on trying is ended
					defer close(watching)
					for len(denied(admin)) == 0 {
						select {
						case <-ended:
							return
						case <-time.After(50 * time.Millisecond):
						}
					}
					select {
					case <-ended:
					case <-time.After(200 * time.Millisecond):
						cancel()
					}
				}()
				err = operate(o, ctx)
				close(ended)
				<-watching
				require.NoError(t, user.Close())
				return denied(admin), err
			}
			refused, err := try(rights)
			require.NoError(t, err)
			require.Empty(t, refused)
			for i, right := range rights {
				if right == "+zscan" { // for more than a thousand holders
					continue
				}
				refused, err := try(slices.Concat(rights[:i], rights[i+1:]))
				require.Error(t, err, "without %s everything works", right)
				require.NotEmpty(t, refused, right)
				require.NotContains(t, err.Error(), secret)
				switch command, ok := strings.CutPrefix(right, "+"); {
				case !ok || slices.Contains([]string{"switch", "publish", "console"}, name):
				case command == "subscribe":
					require.Contains(t, logged.String(), "give the user +subscribe and the channels &semaphore:{", "which waits for nothing else")
				default:
					require.Contains(t, strings.ToLower(err.Error()), command, "the command is named")
				}
				for _, r := range refused {
					if command, ok := strings.CutPrefix(right, "+"); ok {
						require.Contains(t, r, "command "+command+" ", "without %s another one is refused", right)
					}
				}
			}
			t.Logf("%d rights, each of them needed: %v", len(rights), rights)
		})
	}
}

// The user for everything has what the others have, and no more.
func TestACLOfEverything(t *testing.T) {
	users := documented(t)
	union := map[string]bool{}
	for _, name := range []string{"script", "lock", "semaphore", "window"} {
		for _, right := range users[name] {
			union[right] = true
		}
	}
	rights := slices.Clone(users["gateway"])
	slices.Sort(rights)
	require.Equal(t, slices.Sorted(maps.Keys(union)), rights)

	server := redistest.Start(t)
	admin := server.Client(t)
	user := as(t, server, admin, rights)
	works(t, user, admin)
	ctx := within(t, time.Minute)
	require.Empty(t, denied(admin))

	// It is no good for anything else.
	require.NoError(t, admin.Set(ctx, "payroll", "1", 0).Err())
	for _, command := range [][]any{
		{"GET", "payroll"}, {"SET", "payroll", "2"}, {"DEL", "payroll"}, {"KEYS", "*"}, {"SCAN", 0}, {"FLUSHALL"}, {"CONFIG", "GET", "*"}, {"ACL", "LIST"},
		{"SCRIPT", "FLUSH"}, {"PUBLISH", "payroll", "x"}, {"MONITOR"}, {"DEBUG", "SLEEP", 0}, {"SHUTDOWN"},
		{"EVAL", "return redis.call('GET', KEYS[1])", 1, "payroll"}, {"EVAL", "return redis.call('GET', 'payroll')", 0},
		{"EVAL", "return redis.call('FLUSHALL')", 0}, {"EVAL", "return redis.call('PUBLISH', 'payroll', 'x')", 0},
	} {
		err := user.Do(ctx, command...).Err()
		require.Error(t, err, command)
		require.Regexp(t, "NOPERM|The user executing the script can't", err.Error(), command)
	}
	require.Equal(t, "1", admin.Get(ctx, "payroll").Val())
}

// extras are the rights that docs/security.md gives to the user gateway besides, by the remark behind them.
func extras(t *testing.T) map[string][]string {
	t.Helper()
	text, err := os.ReadFile("../../../docs/security.md")
	require.NoError(t, err)
	rights := map[string][]string{}
	for line := range strings.Lines(string(text)) {
		if given, found := strings.CutPrefix(line, "ACL SETUSER gateway +"); found {
			given, remark, _ := strings.Cut("+"+given, "#")
			rights[strings.TrimSpace(remark)] = strings.Fields(given)
		}
	}
	return rights
}

// What some kinds of client need besides: with it everything works and nothing is refused; without any part of it Redis refuses
// something.
func TestACLOfClients(t *testing.T) {
	t.Parallel()
	rights, also := documented(t)["gateway"], extras(t)
	server := redistest.Start(t)
	cluster := redistest.Start(t, "--cluster-enabled", "yes")
	slots := cluster.Client(t)
	require.NoError(t, slots.ClusterAddSlotsRange(context.Background(), 0, 16383).Err())
	require.NoError(t, redistest.Poll(patience, func() error { return slots.Set(context.Background(), "x", 1, time.Second).Err() }))
	for remark, c := range map[string]struct {
		server *redistest.Server
		open   func(o *redis.Options) redis.UniversalClient
	}{
		"a database other than 0": {server, func(o *redis.Options) redis.UniversalClient {
			return redis.NewClient(&redis.Options{Addr: o.Addr, Username: o.Username, Password: o.Password, DB: 3})
		}},
		"a ClientName": {server, func(o *redis.Options) redis.UniversalClient {
			return redis.NewClient(&redis.Options{Addr: o.Addr, Username: o.Username, Password: o.Password, ClientName: "gateway"})
		}},
		"a ClusterClient": {cluster, func(o *redis.Options) redis.UniversalClient {
			return redis.NewClusterClient(&redis.ClusterOptions{Addrs: []string{o.Addr}, Username: o.Username, Password: o.Password})
		}},
	} {
		t.Run(remark, func(t *testing.T) {
			admin := c.server.Client(t)
			if remark == "a database other than 0" {
				admin = c.server.Client(t, func(o *redis.Options) { o.DB = 3 })
			}
			need := also[remark]
			require.NotEmpty(t, need, "the document's line")
			try := func(rights []string, operate func(*operator, context.Context) error) (refused []string, err error) {
				ctx := within(t, time.Minute)
				user := c.open(as(t, c.server, admin, rights).Options())
				defer func() { _ = user.Close() }()
				o := &operator{client: user, admin: admin}
				require.NoError(t, o.fresh(ctx))
				err = operate(o, ctx)
				return denied(admin), err
			}
			refused, err := try(slices.Concat(rights, need), (*operator).everything)
			require.NoError(t, err)
			require.Empty(t, refused)
			for i, right := range need {
				refused, err := try(slices.Concat(rights, need[:i], need[i+1:]), (*operator).window)
				require.NotEmpty(t, refused, right)
				if right != "+command" { // which the client can do without, but asks for again and again
					require.Error(t, err, right)
				}
			}
		})
	}
}

// The policies for outages need a probe of the bucket, and LocalShare a sign of life of each process. The user for it has just the
// rights for these besides, and is refused nothing before an outage, in it and afterwards.
func TestACLOfPolicies(t *testing.T) {
	t.Parallel()
	rights, plain := documented(t)["local-share"], documented(t)["script"]
	require.Subset(t, rights, plain)
	server := redistest.Start(t)
	admin := server.Client(t)
	ctx := within(t, 2*time.Minute)
	open := func(rights []string, policy tokenbucket.FailurePolicy, health func(tokenbucket.Health)) (*tokenbucket.RateLimiter, *redis.Client) {
		user := as(t, server, admin, rights, func(o *redis.Options) { o.ReadTimeout = time.Second }) // for commands without a waiter
		l, err := tokenbucket.NewSmoothBursty("x", 1e6, tokenbucket.WithStore(tokenbucket.NewRedisScriptStore(user)),
			tokenbucket.WithFailurePolicy(policy), tokenbucket.WithStoreTimeout(time.Second), tokenbucket.WithObserver(tokenbucket.Observer{Health: health}))
		require.NoError(t, err)
		return l, user
	}
	quit := func(user *redis.Client) { // or its signs of life would go on, with the rights of the next
		require.NoError(t, user.Close())
		require.NoError(t, redistest.Poll(patience, func() error {
			admin.ClientKillByFilter(ctx, "USER", "user") // a connection that was dialled as its client closed stays open
			if list := admin.ClientList(ctx).Val(); strings.Contains(list, "user=user ") {
				return errors.New(list)
			}
			return nil
		}))
	}
	for name, policy := range map[string]tokenbucket.FailurePolicy{
		"closed": tokenbucket.FailClosed, "open": tokenbucket.FailOpen, "share": tokenbucket.LocalShare(2),
	} {
		need := plain
		if policy == tokenbucket.LocalShare(2) {
			need = rights
		}
		healths := make(chan tokenbucket.Health, 100)
		l, user := open(need, policy, func(h tokenbucket.Health) { healths <- h })
		asked := func() error { _, err := l.Reserve(ctx, 1); return err }
		require.NoError(t, redistest.Poll(patience, asked), name)
		if policy == tokenbucket.LocalShare(2) {
			require.NoError(t, redistest.Poll(patience, func() error {
				if admin.ZCard(ctx, "tokenbucket:instances").Val() == 0 {
					return errors.New("no sign of life")
				}
				return nil
			}))
		}
		require.NoError(t, server.Stop())
		noticed := false
		for began := time.Now(); !noticed && time.Since(began) < patience; {
			_ = asked() // an error, or what the policy says
			select {
			case h := <-healths:
				noticed = h.Down
			default:
			}
		}
		require.NoError(t, server.Continue())
		require.True(t, noticed, "%s: the outage", name)
		for back := false; !back; { // by a probe
			select {
			case h := <-healths:
				back = !h.Down
			case <-time.After(patience):
				require.True(t, back, "%s: the store is there again", name)
			}
		}
		require.NoError(t, redistest.Poll(patience, asked), name) // a busy machine may need longer than the store's second
		require.Empty(t, denied(admin), name)
		quit(user)
	}
	for _, right := range rights {
		if slices.Contains(plain, right) {
			continue
		}
		l, user := open(slices.DeleteFunc(slices.Clone(rights), func(r string) bool { return r == right }), tokenbucket.LocalShare(2), nil)
		require.NoError(t, redistest.Poll(patience, func() error {
			if refused := denied(admin); len(refused) != 1 || !strings.Contains(refused[0], right[1:]) {
				return fmt.Errorf("without %s refused is %v", right, refused)
			}
			return nil
		}))
		runtime.KeepAlive(l)
		quit(user)
	}
}
