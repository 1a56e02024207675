-- Decides one batch on each of one or more buckets. It is PermitBucket.apply of permit_state.go in Lua, and follows bucket.lua. A bucket's batch is
-- one atomic step. Buckets in one call only share the round trip.
--
-- KEYS      for each bucket: its key, a string, see codec.go; and its lock. While a process holds the lock, nothing is decided.
--           While the slot of a bucket moves, only its key, and no other bucket: see moves.go
-- ARGV[1]   now, in microseconds, or '' for the server's clock (TIME, read once)
-- ARGV[2]   a lock's time to live in milliseconds; more than that remains only after the clock was set back
-- ARGV[3]   the time of the predictions, at most 100 ms ago; ARGV[4] their deadline in microseconds of the server's clock, '' for
--           none
-- then for each bucket two, either
--   expected  the whole state that the caller expects to find: after a failover to a stale replica, two states may have epoch and
--             seq in common
--   new       the state to write if the bucket has the expected one: the state after the batch at the time of the predictions, with all
--             requests granted
-- or ''
--   batch   (a bucket that occurs again in a call has no prediction: it is read after its previous batch was decided)
--           the limiter's configuration as text, newline, the newest one received ('' if that is the same), newline, name of
--           the next epoch (a random integer, from which the tags of the batch's grants are derived, too), initial permits,
--           'transient' or 'lasting' (see PermitBucket.renewed), deadline in microseconds of the server's clock ('' for
--           none: run later, nothing is taken), newline, and the requests:
--             T count permits maxWait   count equal requests, maxWait in microseconds
--             G epoch tag tail version id stored next carry end spent level           places given back
--             L permits                 as many as are stored, up to permits, at least two
--             S rate                    set the rate, and max permits in proportion
--             B rate maxPermits         set both
--             H micros                  pause the bucket
--             A permits                 charge permits more, or give them back if the number is negative
--             R                         replace the bucket by a new one
-- returns the time, then for each bucket one string:
--   ''                           the prediction was right and is written
--   wrong                        the prediction was wrong; nothing was written
--   decided, old, new            a line each: the state before ('' if missing), the one written ('' if none was)
--   late | locked ms | corrupt excerpt | error message

-- One command checks all locks. One reads the buckets with predictions, whose values were states lately; the loop below reads the others.
-- MGET returns nil for a value that is no string, so the loop reads that again. An error of a read or of SET is the reply for its bucket
-- alone.
local n, states, free, decide = (#ARGV - 4) / 2, nil, nil, nil
local moves = n == #KEYS
if n == 1 then
  if ARGV[5] ~= '' then states = {try('GET', KEYS[1])} end
  free = not moves and call('EXISTS', KEYS[2]) == 0
else
  local locks, predicted, m = {}, {}, 0
  for i = 1, n do
    locks[i] = KEYS[2 * i]
    if ARGV[3 + 2 * i] ~= '' then
      m = m + 1
      predicted[m] = KEYS[2 * i - 1]
    end
  end
  free = call('EXISTS', unpack(locks)) == 0
  if m > 0 then states = call('MGET', unpack(predicted)) end
end

local as_of = tofloat(ARGV[3])
local fresh = as_of and as_of <= clock and clock - as_of <= GUESS_AGE and (ARGV[4] == '' or clock <= tofloat(ARGV[4]))
local answers, m = {clock_text}, 0
for i = 1, n do
  local key, lock, expected, text = KEYS[2 * i - 1], KEYS[2 * i], ARGV[3 + 2 * i], ARGV[4 + 2 * i]
  local old, held, answer = nil, -2, ''
  if expected ~= '' then
    m = m + 1
    old = states[m]
  end
  old = old or get(key)
  if moves then
    lock = key .. ':lock'
    held = locked(lock)
  elseif not free then
    held = call('PTTL', lock)
  end
  if type(old) == 'table' then
    answer = 'error ' .. old.err
  elseif held ~= -2 then
    if held == -1 or held > tofloat(ARGV[2]) then
      call('PEXPIRE', lock, ARGV[2])
      held = ARGV[2]
    end
    answer = 'locked ' .. held
  elseif expected == '' then
    decide = decide or make_bucket()
    answer = decide(key, old, text)
  elseif fresh and old == expected then
    local done = try('SET', key, text, 'KEEPTTL')
    if done.err then answer = 'error ' .. done.err end
  else
    answer = 'wrong'
  end
  answers[i + 1] = answer
end
return answers
