-- Reads the buckets of a group, or writes them, for a process that holds all their locks. A write happens only if it still holds all of them and
-- each bucket has the state that the writer expects. See commit.lua.
--
-- KEYS      for each member: its bucket's key and its lock
-- ARGV[1]   'read', or 'write'
-- ARGV[2]   now, in microseconds, or '' for the server's clock
-- ARGV[3]   deadline, in microseconds of the server's clock; nothing is written after it; '' for none
-- then for each member four: the token in its lock, the state that it must have ('' for none), the new state ('' to write nothing), and the time to
-- live of that in milliseconds
-- returns 'lost': a lock is no longer held;  'read', the time, and the states ('' if missing): asked for, or because a state is not the expected one
--         'error', a member from 0 and Redis' error: its state cannot be read
--         'late': nothing was written, and the locks are released;  'done', the time: written, and the locks are released

local n = #KEYS / 2
for i = 1, n do
  if redis.call('GET', KEYS[2 * i]) ~= ARGV[4 * i] then return {'lost'} end
end
local now = ARGV[2]
if now == '' then
  local t = redis.call('TIME')
  now = string.format('%.0f', t[1] * 1000000 + t[2])
end
local reply, same = {'read', now}, ARGV[1] == 'write'
for i = 1, n do
  local state = redis.pcall('GETRANGE', KEYS[2 * i - 1], '0', '4096')
  if type(state) == 'table' then return {'error', tostring(i - 1), state.err} end
  same = same and state == ARGV[4 * i + 1]
  if #state > 4096 then state = state:sub(1, 80) end -- not a state
  reply[2 + i] = state
end
if not same then return reply end
local late = ARGV[3] ~= '' and tonumber(now) > tonumber(ARGV[3])
for i = 1, n do
  if not late and ARGV[4 * i + 2] ~= '' then redis.call('SET', KEYS[2 * i - 1], ARGV[4 * i + 2], 'PX', ARGV[4 * i + 3]) end
  redis.call('DEL', KEYS[2 * i])
end
return {late and 'late' or 'done', now}
