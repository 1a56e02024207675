-- Notes that an instance lives, and counts those that do. An instance that has died counts until its time is over.
--
-- KEYS[1]  the instances of a fleet: a sorted set by the time in milliseconds at which they were seen
-- ARGV[1]  this instance
-- ARGV[2]  how long an instance counts after it was seen, in milliseconds
-- returns  the number of instances, this one included
-- clock    the server's

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.0f', now - ARGV[2]))
redis.call('ZREMRANGEBYSCORE', KEYS[1], string.format('(%.0f', now), '+inf') -- seen before the clock was set back
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {tostring(redis.call('ZCARD', KEYS[1]))}
