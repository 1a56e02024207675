-- Writes one or more buckets together, if each of them still has the state that the writer has read, and no process holds a lock.
--
-- KEYS     for each bucket: its key, and its lock. While their slot moves, the keys of the buckets that exist, see moves.go
-- ARGV[1]  now, in microseconds, or '' for the server's clock
-- ARGV[2]  deadline, in microseconds of the server's clock; nothing is written after it; '' for none
-- ARGV[3]  the time to live of the written states, in milliseconds; '' only reads
-- then for each bucket two: the state that it must have, '' for none; and the new one, '' to write nothing
-- then, while their slot moves, the keys of all buckets
-- returns 'done';  'late';  'locked' and the lock's remaining milliseconds;
--         'read', the time, and the states ('' if missing): if the call only reads, or because a state is not the expected one. Of a value
--         longer than 1 MiB one byte more is read;
--         TRYAGAIN if a bucket is not here and cannot be made here, since the slot moves away

local moves = #KEYS ~= #ARGV - 3
local buckets = moves and (#ARGV - 3) / 3 or #KEYS / 2
local function key(i) return moves and ARGV[3 + 2 * buckets + i] or KEYS[2 * i - 1] end
local function elsewhere(reply) return moves and type(reply) == 'table' and reply.err and reply.err:find('non local key', 1, true) end
for i = 1, buckets do
  local left = redis.pcall('PTTL', key(i) .. ':lock')
  if elsewhere(left) then
    left = -2
  elseif type(left) == 'table' then
    return left
  end
  if left ~= -2 then return {'locked', tostring(left)} end
end
local now = ARGV[1]
if now == '' then
  local t = redis.call('TIME')
  now = string.format('%.0f', t[1] * 1000000 + t[2])
end
local reply, same = {'read', now}, ARGV[3] ~= ''
for i = 1, buckets do
  local state = redis.pcall('GETRANGE', key(i), '0', '1048576')
  if elsewhere(state) then return redis.error_reply('TRYAGAIN a bucket is not here') end
  if type(state) == 'table' then return state end
  reply[2 + i] = state
  same = same and state == ARGV[2 + 2 * i]
end
if not same then return reply end
if ARGV[2] ~= '' and tonumber(now) > tonumber(ARGV[2]) then return {'late'} end
for i = 1, buckets do
  if ARGV[3 + 2 * i] ~= '' then redis.call('SET', key(i), ARGV[3 + 2 * i], 'PX', ARGV[3]) end
end
return {'done'}
