-- Writes one or more buckets together, if each of them still has the state that the writer has read, and no process holds a lock.
--
-- KEYS     for each bucket: its key, and its lock
-- ARGV[1]  now, in microseconds, or '' for the server's clock
-- ARGV[2]  deadline, in microseconds of the server's clock; nothing is written after it; '' for none
-- ARGV[3]  the time to live of the written states, in milliseconds; '' only reads
-- then for each bucket two: the state that it must have, '' for none; and the new one, '' to write nothing
-- returns 'done';  'late';  'locked' and the lock's remaining milliseconds;
--         'read', the time, and the states ('' if missing): if the call only reads, or because a state is not the expected one. Of a value
--         longer than 1 MiB one byte more is read

local buckets = #KEYS / 2
for i = 1, buckets do
  local left = redis.call('PTTL', KEYS[2 * i])
  if left ~= -2 then return {'locked', tostring(left)} end
end
local now = ARGV[1]
if now == '' then
  local t = redis.call('TIME')
  now = string.format('%.0f', t[1] * 1000000 + t[2])
end
local reply, same = {'read', now}, ARGV[3] ~= ''
for i = 1, buckets do
  local state = redis.call('GETRANGE', KEYS[2 * i - 1], '0', '1048576')
  reply[2 + i] = state
  same = same and state == ARGV[2 + 2 * i]
end
if not same then return reply end
if ARGV[2] ~= '' and tonumber(now) > tonumber(ARGV[2]) then return {'late'} end
for i = 1, buckets do
  if ARGV[3 + 2 * i] ~= '' then redis.call('SET', KEYS[2 * i - 1], ARGV[3 + 2 * i], 'PX', ARGV[3]) end
end
return {'done'}
