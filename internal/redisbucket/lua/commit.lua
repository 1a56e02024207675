-- Writes a bucket and releases its lock, if the writer still holds the lock and the bucket still has the state that the writer expects.
-- So neither a lock that expired under its holder nor a FLUSHALL in between lets an old state overwrite a newer one.
--
-- KEYS[1]  the bucket; KEYS[2] its lock
-- ARGV[1]  the holder's token
-- ARGV[2]  now, in microseconds, or '' for the server's clock
-- ARGV[3]  the time of a prediction, at most 100 ms ago; '' if the state was read under this lock
-- ARGV[4]  deadline, in microseconds of the server's clock; nothing is written after it; '' for none
-- ARGV[5]  the state that the bucket must have, '' for none
-- ARGV[6]  the new state, '' to write nothing; ARGV[7] its time to live in milliseconds, '' to keep that of the key
-- ARGV[8]  the lock's time to live in milliseconds, to keep it for the next batch; '' to release it
-- returns 'done' and the time: written, and the lock is released unless it is kept
--         'late': nothing was written, and the lock is released
--         'lost': the writer no longer holds the lock
--         'changed', the time, the state: the bucket has another state, or the prediction was made by a wrong clock; the lock is still held

if redis.call('GET', KEYS[2]) ~= ARGV[1] then return {'lost'} end
if ARGV[6] == '' then
  redis.call('DEL', KEYS[2])
  return {'done'}
end
local now = tonumber(ARGV[2])
if not now then
  local t = redis.call('TIME')
  now = t[1] * 1000000 + t[2]
end
local prediction, late = tonumber(ARGV[3]), ARGV[4] ~= '' and now > tonumber(ARGV[4])
if late and not prediction then
  redis.call('DEL', KEYS[2])
  return {'late'}
end
local state = redis.call('GETRANGE', KEYS[1], '0', '4096')
if state ~= ARGV[5] or (prediction and (late or prediction > now or now - prediction > 100000)) then
  if #state > 4096 then state = state:sub(1, 80) end -- not a state
  return {'changed', string.format('%.0f', now), state}
end
if ARGV[7] == '' then
  redis.call('SET', KEYS[1], ARGV[6], 'KEEPTTL')
else
  redis.call('SET', KEYS[1], ARGV[6], 'PX', ARGV[7])
end
if ARGV[8] == '' then
  redis.call('DEL', KEYS[2])
else
  redis.call('PEXPIRE', KEYS[2], ARGV[8])
end
return {'done', string.format('%.0f', now)}
