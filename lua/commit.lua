-- Writes a bucket and releases its lock, if the lock is still the writer's and the bucket still what was read.
-- So neither a lock that expired under its holder nor a FLUSHALL in between lets an old state overwrite a newer one.
--
-- KEYS[1]  the bucket; KEYS[2] its lock
-- ARGV[1]  the holder's token
-- ARGV[2]  deadline, in microseconds of the server's clock: run later, nothing is written; '' for none
-- ARGV[3]  the state that was read, '' for none
-- ARGV[4]  the new state, '' to write nothing; ARGV[5] its time to live in milliseconds
-- returns 1: done;  0: the lock was lost, or the state changed;  2: too late. The lock is released in any case.

if redis.call('GET', KEYS[2]) ~= ARGV[1] then return 0 end
redis.call('DEL', KEYS[2])
if ARGV[4] == '' then return 1 end
if (redis.call('GET', KEYS[1]) or '') ~= ARGV[3] then return 0 end
if ARGV[2] ~= '' then
  local t = redis.call('TIME')
  if t[1] * 1000000 + t[2] > tonumber(ARGV[2]) then return 2 end
end
redis.call('SET', KEYS[1], ARGV[4], 'PX', ARGV[5])
return 1
