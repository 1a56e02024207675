-- Records the heartbeat of an instance and counts the live instances. An instance that has died counts until ARGV[2] has passed.
--
-- KEYS[1]  the instances of a fleet: a sorted set, scored by the time of the last heartbeat in milliseconds
-- ARGV[1]  this instance
-- ARGV[2]  how long an instance counts after its last heartbeat, in milliseconds
-- returns  the number of instances, this one included
-- clock    the server's

local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
redis.call('ZADD', KEYS[1], string.format('%.0f', now), ARGV[1])
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', string.format('(%.0f', now - ARGV[2]))
redis.call('ZREMRANGEBYSCORE', KEYS[1], string.format('(%.0f', now), '+inf') -- heartbeats from before the clock was set back
redis.call('PEXPIRE', KEYS[1], ARGV[2])
return {tostring(redis.call('ZCARD', KEYS[1]))}
