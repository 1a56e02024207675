-- Takes the key state away from the server that its slot leaves, if the leases and their permits are not there. adopt.lua puts it where they are.
-- If the process dies in between, the state is lost, as if Redis had evicted it: apply.lua counts the permits again, and makes the fence of the
-- time.
--
-- KEYS      state, see apply.lua
-- ARGV      held and info. They are not among KEYS: a server without them could not run the script.
-- returns   the fields of the hash; nothing if the key stays: one of the others is here, or the field quiet has all of them

local call = redis.call
for i, command in ipairs({'ZCARD', 'HLEN'}) do
  local found = redis.pcall(command, ARGV[i])
  if type(found) ~= 'table' or not found.err:find('non local key', 1, true) then return {} end
end
local all = call('HGETALL', KEYS[1])
for i = 1, #all, 2 do
  if all[i] == 'quiet' then return {} end
end
call('DEL', KEYS[1])
return all
